"""Tests of `doctor` with a configuration and of `preflight=true`: findings, refusals and exit codes."""

from pathlib import Path

import pytest

from async_flowrl import main as program
from async_flowrl.cli import doctor
from async_flowrl.config import exit_codes
from async_flowrl.config.compose import compose_config
from async_flowrl.run import machines as told

LOCAL = ("runtime.backend=local", "total_steps=1", "evaluate.before_training=false", "model.tiny.layers=1")


def test_a_configuration_that_can_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--config-name", "sync", *LOCAL, f"output_dir={tmp_path / 'run'}"]) == 0
    said = capsys.readouterr().out
    for name in (
        "configuration",
        "devices",
        "node here",
        "memory",
        "object store",
        "run directory",
        "optional vllm-omni",
    ):
        assert f" {name}: " in said, name
    assert said.endswith("this configuration can start here\n")
    assert not (tmp_path / "run").exists() and not list(tmp_path.iterdir())


def test_what_cannot_start_is_named_and_is_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    used = tmp_path / "run"
    used.mkdir()
    (used / "metrics.jsonl").write_text("{}\n")
    assert doctor.main([*LOCAL, f"output_dir={used}"]) == 1
    said = capsys.readouterr().out
    assert "failed   configuration: " in said and "is not empty" in said
    assert said.endswith("this configuration cannot start here: 1 of 1 checks failed\n")


def test_preflight_refuses_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(told, "free_memory", lambda: 1_000_000)
    config = compose_config("sync", [*LOCAL, "preflight=true", f"output_dir={tmp_path / 'run'}"])
    assert program.train(config, {}) == exit_codes.CONFIG
    said = capsys.readouterr().err
    assert "preflight: 2 of" in said and "  failed   memory: " in said and "  failed   object store: " in said
    assert not (tmp_path / "run").exists()


def test_two_steps_are_trained_where_nothing_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ("group_size=4", "trainer.micro_batch_size=4", "rollout.num_inference_steps=3")
    words = ["--run", "--config-name", "sync", *LOCAL, *short]
    assert doctor.main([*words, f"output_dir={tmp_path / 'run'}"]) == 0
    said = capsys.readouterr().out
    assert "ok       two steps: " in said and said.endswith("this configuration can start here\n")
    assert not list(tmp_path.iterdir())
    used = tmp_path / "used"
    used.mkdir()
    (used / "metrics.jsonl").write_text("{}\n")
    assert doctor.main([*words, f"output_dir={used}"]) == 1
    assert "two steps" not in capsys.readouterr().out
