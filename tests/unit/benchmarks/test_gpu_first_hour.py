"""Tests of the first hour on a GPU: limits of its stages, what it writes when one fails, and what runs on a CPU."""

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from async_flowrl.config.compose import compose_config
from async_flowrl.run.prepare import Prepared, prepare
from benchmarks.gpu_first_hour import __main__ as program
from benchmarks.gpu_first_hour import full_size, kernels, one_card
from benchmarks.gpu_first_hour.__main__ import CALL_SECONDS, HOUR_SECONDS, STAGES, Stage
from benchmarks.gpu_first_hour.sizes import FULL, SMALL, one_block, settings
from benchmarks.gpu_first_hour.task import Task

ROOT = Path(__file__).parents[3]
PROBES = "tests.unit.benchmarks.first_hour_stages"


def stages(**seconds: int) -> dict[str, Stage]:
    return {name: Stage(f"{PROBES}:{name}", limit, 1, "a test") for name, limit in seconds.items()}


def run(folder: Path, limit: float = 300.0, **seconds: int) -> tuple[int, dict[str, Any]]:
    """Runs stages of first_hour_stages.py; returns the exit code and stages.json."""
    code = program.run_stages(stages(**seconds), folder / "out", folder / "work", limit)
    return code, json.loads((folder / "out" / "stages.json").read_text())


def test_the_limits_fit_into_the_calls_and_into_the_hour() -> None:
    calls = [stage.call for stage in STAGES.values()]
    assert calls == sorted(calls) and set(calls) == {1, 2, 3}
    for call in set(calls):
        assert sum(stage.seconds for stage in STAGES.values() if stage.call == call) <= CALL_SECONDS
    assert sum(stage.seconds for stage in STAGES.values()) <= HOUR_SECONDS
    assert all(callable(resolve_name(stage.place)) for stage in STAGES.values())


def test_a_stage_that_fails_hangs_or_has_no_memory_is_named_and_the_next_one_runs(tmp_path: Path) -> None:
    names = ("wrong", "hangs", "out_of_memory", "device_out_of_memory", "killed", "silent", "sound")
    code, written = run(tmp_path, **(dict.fromkeys(names, 60) | {"hangs": 6}))
    assert code == 1 and tuple(written) == names
    results = {name: each["result"].partition(":")[0] for name, each in written.items()}
    assert results == {
        "wrong": "failed",
        "hangs": "hangs",
        "out_of_memory": "out of memory",
        "device_out_of_memory": "out of memory",
        "killed": "killed (SIGKILL), as Linux does where memory is short",
        "silent": "failed",
        "sound": "ok",
    }
    assert written["wrong"]["result"] == "failed: one digest"
    (before,) = written["hangs"]["lines"]
    assert gone(before["child"]), "what a stage has started outlives it"
    rows = (tmp_path / "out" / "stages.md").read_text().splitlines()[2:]
    assert [row.split(" | ")[0].strip("| ") for row in rows] == list(names)
    with tarfile.open(tmp_path / "out" / "logs.tar.gz") as archive:
        log = archive.extractfile("logs/hangs.log")
        assert log is not None and b"in hangs" in log.read(), "the stack says where it hung"


def gone(process: int) -> bool:
    return not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE


def test_everything_is_written_before_the_next_stage_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    run_stage = program.run_stage

    def watched(name: str, *arguments: Any) -> dict[str, Any]:
        file = tmp_path / "out" / "stages.json"
        seen.append(list(json.loads(file.read_text())) if file.exists() else [])
        return run_stage(name, *arguments)

    monkeypatch.setattr(program, "run_stage", watched)
    code, _ = run(tmp_path, sound=60, silent=60)
    assert code == 1 and seen == [[], ["sound"]]


def test_processes_that_a_stage_leaves_are_ended_and_named(tmp_path: Path) -> None:
    code, written = run(tmp_path, leaves=60)
    assert code == 0 and len(written["leaves"]["left_over"]) == 1
    assert "left over: " in (tmp_path / "out" / "stages.md").read_text()


def test_a_stage_for_which_no_time_is_left_is_skipped(tmp_path: Path) -> None:
    code, written = run(tmp_path, limit=12.0, sound=60)
    assert code == 1 and written["sound"]["result"].startswith("skipped") and written["sound"]["lines"] == []


def test_an_unknown_stage_is_refused_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["glyph"]) == 2
    said = capsys.readouterr().err
    assert "did you mean 'glyphs'" in said and said.count("\n") == 1


def test_what_travels_is_counted_and_refused_where_it_is_too_large() -> None:
    def check(**given: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "benchmarks/gpu_first_hour/prepare.sh", "--check"]
        return subprocess.run(command, cwd=ROOT, env={**os.environ, **given}, capture_output=True, text=True)

    fits, large = check(LIMIT="67108864"), check(LIMIT="1000")
    assert fits.returncode == 0 and int(fits.stdout.split()[1]) > 1_000_000, fits.stdout + fits.stderr
    assert large.returncode == 1 and "too large" in large.stdout


def test_every_process_is_a_host_of_its_own_for_nccl(tmp_path: Path) -> None:
    """The sitecustomize that would have been imported without it is imported, too."""
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['OTHER'] = 'too'")
    path = os.pathsep.join([one_card.environment(2)["PYTHONPATH"], str(tmp_path)])
    source = "import os; print(os.environ['NCCL_HOSTID'], os.environ.get('OTHER'), os.getpid())"

    def said(**given: str) -> list[str]:
        environment = {**os.environ, "PYTHONPATH": path, **given}
        done = subprocess.run(
            [sys.executable, "-c", source], capture_output=True, text=True, env=environment, check=True
        )
        return done.stdout.split()

    host, other, process = said(NCCL_HOSTID="one-card-1")
    assert (host, other) == (f"one-card-{process}", "too")
    assert said(NCCL_HOSTID="mine")[0] == "mine"


def test_processes_that_nccl_connects_are_judged_by_what_they_say() -> None:
    digest, failed = "0" * 64, "TransferFailed: broadcast"
    assert one_card.good(one_card.DELIVERY, [digest] * 3)
    assert not one_card.good(one_card.DELIVERY, [digest, digest, "1" * 64])
    assert not one_card.good(one_card.DELIVERY, [failed] * 3)
    assert one_card.good(one_card.DEATH, [failed, digest, "died"]) and one_card.good(
        one_card.DEATH, [failed, failed, "died"]
    )
    assert not one_card.good(one_card.DEATH, [digest, digest, "died"])
    assert one_card.good(one_card.REFUSED, [failed] * 3) and not one_card.good(one_card.REFUSED, [digest] * 3)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("first_hour")


def with_guidance(work: Path) -> Prepared:
    words = [*settings(SMALL), "placement=separate", "rollout.true_cfg_scale=4", "rollout.num_inference_steps=7"]
    return prepare(compose_config("one_step_off", [*words, f"output_dir={work / 'none'}"]))


def test_the_trainer_has_the_negative_prompts_of_true_guidance(work: Path) -> None:
    prepared = with_guidance(work)
    worked, trajectories, negatives = full_size.rolled_out(prepared, rounds=1)
    assert list(negatives) == [prepared.config.rollout.negative_prompt] and worked["seconds"] > 0
    trained = full_size.trained(prepared, trajectories, negatives, rounds=1)
    assert trained["seconds"] > 0 and trained["flops"] > 0 and worked["flops"] > 0
    with pytest.raises(Exception, match="negative"):
        full_size.trained(prepared, trajectories, {}, rounds=1)


def test_full_size_says_plan_and_speed_of_both_pools(work: Path) -> None:
    task = Task(work / "full.json", work, time.monotonic() + 600.0, ["rollout.num_inference_steps=7"])
    full_size.full(task)
    said = json.loads((work / "full.json").read_text())
    assert [each["what"] for each in said] == ["rollout worker", "trainer rank"]
    assert all(each["planned_gib"] > 0 and each["images_per_second"] > 0 for each in said)


def test_other_models_are_measured_with_and_without_guidance(work: Path) -> None:
    task = Task(work / "others.json", work, time.monotonic() + 600.0, ["rollout.num_inference_steps=7"])
    full_size.others(task)
    said = json.loads((work / "others.json").read_text())
    assert len(said) == 2 * len(full_size.OTHERS) and all(each["images_per_second"] > 0 for each in said)
    flops = {each["what"]: each["flops"] for each in said}
    with_both, alone = (flops[f"SD 3.5 medium{how}, rollout worker"] for how in ("", " without guidance"))
    assert with_both > 1.5 * alone


def test_a_block_of_published_width_is_made_without_files(work: Path) -> None:
    prepared = prepare(compose_config("one_step_off", [*one_block(work, FULL), f"output_dir={work / 'none'}"]))
    assert prepared.shapes.latents == (1024, 64) and prepared.model.random
    assert not list((work / "models").rglob("*.safetensors"))


def test_digests_repeat_on_a_cpu_in_both_dtypes(work: Path) -> None:
    found = kernels.all_digests(work, rounds=2)
    assert {name.rpartition(" in ")[2] for name in found} == {"bfloat16", "float32"} and len(found) == 12
    for name, made in found.items():
        assert len(set(made)) == 1 and len(made[0]) == 32, name
    assert len({made[0] for made in found.values()}) == 11, (
        "only the step of AdamW, on float32 masters, is the same work"
    )


def test_a_digest_sees_the_last_bit_and_a_refusal() -> None:
    def once(value: Tensor) -> str:
        return kernels.digest(lambda: [value])

    one = torch.ones(8)
    assert once(one) != once(one.nextafter(torch.tensor(2.0)))

    def refuses() -> list[Tensor]:
        raise RuntimeError("scatter_add has no deterministic form\nmore")

    assert kernels.digest(refuses) == "refused: scatter_add has no deterministic form"

    def overflows() -> list[Tensor]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        kernels.digest(overflows)
