"""Tests of `doctor` with a configuration and of `preflight=true`: findings, refusals and exit codes."""

from pathlib import Path
from typing import Any

import pytest

from async_flowrl import main as program
from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import compose_config
from async_flowrl.doctor import __main__ as doctor
from async_flowrl.doctor import facts as told
from async_flowrl.doctor import start
from async_flowrl.doctor.needs import needs_of
from async_flowrl.memory.host import PROCESS_BYTES
from async_flowrl.memory.processes import plan_memory

LOCAL = ("runtime.backend=local", "total_steps=1", "evaluate.before_training=false", "model.tiny.layers=1")


def test_a_configuration_that_can_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--config-name", "sync", *LOCAL, f"output_dir={tmp_path / 'run'}"]) == 0
    said = capsys.readouterr().out
    for name in ("configuration", "Ray", "node here", "memory", "object store", "run directory", "optional vllm-omni"):
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


def test_a_cluster_that_does_not_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"output_dir={tmp_path / 'run'}", "runtime.address=127.0.0.1:1", "rollout.engine=vllm_omni"]
    assert doctor.main(words) == 1
    said = capsys.readouterr().out
    assert "failed   Ray: runtime.address=127.0.0.1:1: no Ray cluster answers" in said
    assert "skipped  optional vllm-omni: " in said and "each node is asked for it" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["total_stepz=1"], "total_steps"),
        (["--config-name", "one_step_of"], "one_step_off"),
        (["--nodes", "2", "total_steps=1"], "needs runtime.address"),
        (["--gpu", "total_steps=1"], "takes no configuration"),
    ],
)
def test_bad_words_are_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("doctor: ") and sentence in said and said.count("\n") == 1


def test_preflight_refuses_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told, "free_memory", lambda: 1_000_000)
    config = compose_config("sync", [*LOCAL, "preflight=true", f"output_dir={tmp_path / 'run'}"])
    with pytest.raises(ConfigError) as refusal:
        program.train(config, {})
    said = str(refusal.value)
    assert "preflight: 2 of" in said and "  failed   memory: " in said and "  failed   object store: " in said
    assert not (tmp_path / "run").exists()


def test_preflight_lets_a_run_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    original = start.start_findings

    def watched(*arguments: Any) -> Any:
        looked.append(arguments)
        return original(*arguments)

    monkeypatch.setattr("async_flowrl.doctor.preflight.start_findings", watched)
    short = ("group_size=4", "trainer.micro_batch_size=4", "rollout.num_inference_steps=3", "preflight=true")
    config = compose_config("sync", [*LOCAL, *short, "evaluate.images_per_prompt=1", f"output_dir={tmp_path / 'run'}"])
    assert program.train(config, {}) == 0
    assert looked and (tmp_path / "run" / "summary.json").exists()


def test_needs_grow_with_what_is_asked_for() -> None:
    few, many = compose_config("sync"), compose_config("sync", ["save.keep=9", "rollout.num_workers=4"])
    on_cpu, on_gpu = needs_of(few, on_gpus=False), needs_of(few, on_gpus=True)
    assert needs_of(many, on_gpus=False).run_directory > on_cpu.run_directory
    assert needs_of(many, on_gpus=False).memory > on_cpu.memory > on_gpu.memory


def test_the_controller_holds_the_newest_states_of_a_lora() -> None:
    held = [
        next(
            one.bytes
            for one in needs_of(compose_config("sync", words), on_gpus=False).processes
            if one.pool == "controller"
        )
        for words in (["tune=full"], [], ["lora.rank=64"])
    ]
    assert held[0] == PROCESS_BYTES < held[1] < held[2]


def test_an_elastic_pool_needs_its_least_workers() -> None:
    elastic = ("runtime.address=auto", "rollout.num_workers=4", "rollout.min_workers=1", "rollout.max_workers=6")
    fixed, grown = (needs_of(compose_config("sync", words), on_gpus=False).processes for words in ((), elastic))
    assert [(one.count, one.later) for one in fixed if one.pool == "rollout"] == [(1, 0)]
    assert [(one.count, one.later) for one in grown if one.pool == "rollout"] == [(1, 5)]


def test_processes_that_sample_and_train_hold_the_base_once() -> None:
    separate, shared = compose_config("sync"), compose_config("sync", ["placement=shared"])
    found = needs_of(shared, on_gpus=False)
    assert [process.pool for process in found.processes] == ["shared", "reward", "controller"]
    assert found.memory < needs_of(separate, on_gpus=False).memory - plan_memory(shared).model.base_bytes
