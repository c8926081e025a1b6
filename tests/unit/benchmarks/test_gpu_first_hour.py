"""Tests of the first hour on a GPU: limits of its stages, what it writes when one fails, and what runs on a CPU."""

import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_flowrl.config.compose import compose_config
from async_flowrl.run.prepare import Prepared, prepare
from benchmarks.gpu_first_hour import __main__ as program
from benchmarks.gpu_first_hour import full_size, kernel_bits
from benchmarks.gpu_first_hour.__main__ import Stage
from benchmarks.gpu_first_hour.sizes import SMALL, settings
from benchmarks.gpu_first_hour.task import GRACE_SECONDS

PROBES = "tests.unit.benchmarks.first_hour_stages"


def stages(**seconds: int) -> dict[str, Stage]:
    return {name: Stage(f"{PROBES}:{name}", limit, 1, "a test") for name, limit in seconds.items()}


def run(folder: Path, limit: float = 300.0, **seconds: int) -> tuple[int, dict[str, Any]]:
    """Runs stages of first_hour_stages.py; returns the exit code and stages.json."""
    code = program.run_stages(stages(**seconds), folder / "out", folder / "work", limit)
    return code, json.loads((folder / "out" / "stages.json").read_text())


@pytest.mark.extended
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


def test_a_stage_begins_with_the_one_it_names_and_every_call_has_time_for_all_of_its_own(tmp_path: Path) -> None:
    one = Stage(f"{PROBES}:meets", 240, 1, "a test")
    pair = {"one": one, "other": replace(one, beside="one")}
    assert program.run_stages(pair, tmp_path / "out", tmp_path / "work", 300.0) == 0
    assert program.together({"before": one, "other": pair["other"]}) == [["before"], ["other"]]
    for call in (1, 2, 3):
        groups = program.together({name: each for name, each in program.STAGES.items() if each.call == call})
        longest = sum(max(program.STAGES[name].seconds for name in names) for names in groups)
        assert longest + 2 * GRACE_SECONDS <= program.CALL_SECONDS


def gone(process: int) -> bool:
    return not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("first_hour")


def with_guidance(work: Path) -> Prepared:
    words = [*settings(SMALL), "placement=separate", "rollout.true_cfg_scale=4", "rollout.num_inference_steps=7"]
    return prepare(compose_config("one_step_off", [*words, f"output_dir={work / 'none'}"]))


@pytest.mark.slow
def test_the_trainer_has_the_negative_prompts_of_true_guidance(work: Path) -> None:
    prepared = with_guidance(work)
    worked, trajectories, negatives = full_size.rolled_out(prepared, rounds=1)
    assert list(negatives) == [prepared.config.rollout.negative_prompt] and worked["seconds"] > 0
    trained = full_size.trained(prepared, trajectories, negatives, rounds=1)
    assert trained["seconds"] > 0 and trained["flops"] > 0 and worked["flops"] > 0
    with pytest.raises(Exception, match="negative"):
        full_size.trained(prepared, trajectories, {}, rounds=1)


@pytest.mark.slow
def test_digests_repeat_on_a_cpu_in_both_dtypes(work: Path) -> None:
    found = kernel_bits.all_digests(work, rounds=2)
    assert {name.rpartition(" in ")[2] for name in found} == {"bfloat16", "float32"} and len(found) == 12
    for name, made in found.items():
        assert len(set(made)) == 1 and len(made[0]) == 32, name
    assert len({made[0] for made in found.values()}) == 11, (
        "only the step of AdamW, on float32 masters, is the same work"
    )
