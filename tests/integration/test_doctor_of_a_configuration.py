"""Tests of `doctor` with a configuration: findings, refusals and exit codes."""

from pathlib import Path

import pytest

from async_flowrl import main as program
from async_flowrl.cli import doctor
from async_flowrl.config.compose import compose_config
from tests.integration.runs import LOCAL

ONE_STEP = ("runtime.backend=local", "total_steps=1", "evaluate.before_training=false", "model.tiny.layers=1")


def test_a_configuration_that_can_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A warning of a run's start is one of the doctor."""
    full = ("tune=full", "save.keep=100000000", f"output_dir={tmp_path / 'run'}")
    assert doctor.main(["--config-name", "sync", *ONE_STEP, *full]) == 0
    said = capsys.readouterr().out
    assert "ok       configuration: " in said and "warning  start: the disk of " in said and "ok       start: " in said
    assert not list(tmp_path.iterdir())


def test_what_cannot_start_is_named_and_is_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    used = tmp_path / "run"
    used.mkdir()
    (used / "metrics.jsonl").write_text("{}\n")
    assert doctor.main([*ONE_STEP, f"output_dir={used}"]) == 1
    said = capsys.readouterr().out
    assert "failed   configuration: " in said and "is not empty" in said
    monkeypatch.setattr("separation.node.total_memory", lambda: 1_000)
    monkeypatch.setattr("separation.node.swap_space", lambda: 0)
    assert doctor.main([*ONE_STEP, "--run", f"output_dir={tmp_path / 'other'}"]) == 1
    said = capsys.readouterr().out
    assert "failed   start: node 127.0.0.1 has 9.31e-07 GiB" in said and "two steps" not in said
    monkeypatch.setattr("async_flowrl.run.job.load_pools", None)
    config = compose_config("one_step_off", [*LOCAL, "tune=full", f"output_dir={tmp_path / 'another'}"])
    assert program.train(config, dict) == 2, "a run is refused before a model is loaded"
    (said,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("async_flowrl: "))
    for words in ("node 127.0.0.1 has 9.31e-07 GiB", "trainer rank", "rollout worker", "allow_oom=true tries anyway"):
        assert words in said


@pytest.mark.slow
def test_two_steps_are_trained_where_nothing_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ("group_size=4", "trainer.micro_batch_size=4", "rollout.num_inference_steps=3")
    words = ["--run", "--config-name", "sync", *ONE_STEP, *short]
    assert doctor.main([*words, f"output_dir={tmp_path / 'run'}"]) == 0
    assert "ok       two steps: " in capsys.readouterr().out and not list(tmp_path.iterdir())
