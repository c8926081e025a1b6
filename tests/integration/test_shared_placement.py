"""Tests of `placement=shared`: processes that sample and train make the weights of separate pools, bit for bit."""

from pathlib import Path

import pytest

from tests.integration.runs import Run, train, train_here_on_ray
from tests.integration.stopped import HALVES, StoppedRun

CASES = {
    "sync": (),
    "stream": (),
    "one_step_off": (),
    "fully_async": ("max_staleness=2",),
    "one_step_off hand_over=batch": ("trainer.updates_per_batch=2",),
    "one_step_off algorithm=diffusion_nft": (),
    "one_step_off trainer.ema_decay=0.9": ("evaluate.every=2", "evaluate.before_training=true"),
}
"""Mode and a setting → further settings: every hand-over and depth, averaged policies, evaluations beside training."""

STEPS = 4
DEFAULT = ("one_step_off trainer.ema_decay=0.9",)
"""The others repeat at length what the toys of tests/unit/shared do in virtual time."""


@pytest.mark.parametrize(
    "case", [case if case in DEFAULT else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_the_weights_of_separate_pools(tmp_path: Path, case: str) -> None:
    mode, *setting = case.split(" ")
    given = (f"total_steps={STEPS}", *setting, *CASES[case])
    separate = train(tmp_path / "separate", mode, *given)
    shared = train(tmp_path / "shared", mode, "placement=shared", *given)
    assert shared.summary["placement"] == "shared"
    assert shared.digest == separate.digest
    assert shared.digests == separate.digests and len(set(shared.digests)) == STEPS + 1
    assert shared.sample_log == separate.sample_log
    assert shared.column("staleness/max") == separate.column("staleness/max")
    evaluated = [[line.get("evaluation/reward/mean") for line in run.metrics] for run in (separate, shared)]
    assert evaluated[0] == evaluated[1]
    swaps = [run.column("pool/rollout/swaps") for run in (separate, shared)]
    assert [sum(each) > 0 for each in swaps] == ["ema" in case] * 2, "only what is evaluated is swapped in, and out"
    assert [run.summary["swaps"] for run in (separate, shared)] == [sum(each) for each in swaps]
    assert set(separate.summary["devices"].values()) == {None}
    shares = shared.summary["devices"]
    assert 0 < shares["sampled"] < 1 and 0 < shares["trained"] < 1 and shares["idle"] < 1


def test_two_processes_that_sample_and_train(tmp_path: Path, stopped_run: StoppedRun) -> None:
    """The steps before SIGTERM have the weights of threads, version by version, and both processes did both."""
    shared = stopped_run.run
    assert shared.summary["steps"] >= 2
    threads = train(tmp_path, "one_step_off", HALVES, f"total_steps={shared.summary['steps']}")
    assert shared.digests == threads.digests and len(set(shared.digests)) == len(threads.metrics) + 1
    assert shared.digest == threads.digest
    first = [run.metrics[0] for run in (shared, threads)]
    moved = [{key: x for key, x in line.items() if key.startswith("kl_per_update")} for line in first]
    assert moved[0] == moved[1] and moved[0]["kl_per_update"] > 0.0, "it is measured after the step"
    pids = {event["worker"]: event["pid"] for event in shared.events if event["event"] == "worker"}
    assert [pids[f"rollout-{index}"] == pids[f"trainer-{index}"] for index in (0, 1)] == [True, True]
    assert pids["rollout-0"] != pids["rollout-1"]
    for pool, name in (("rollout", "generate"), ("trainer", "backward")):
        busy = {e["worker"] for e in shared.events if e["event"] == "span" and e["name"] == name}
        assert busy == {f"{pool}-0", f"{pool}-1"}


GIVEN = ("ticket_size=2", "trainer.micro_batch_size=2", "save.every=1")
EVERYTHING = (
    *("max_staleness=2", "trainer.ema_decay=0.9", "evaluate.every=2", "algorithm=crd"),
    *("algorithm.reference_every=2", "algorithm.kl_coef=5"),
)
"""Moments, averages for evaluations, sampling and the loss, a renewed reference, and a ring of three versions go on."""
KEY = "evaluation/reward/mean"


def ran(folder: Path, processes: int, steps: int, *more: str) -> Run:
    pools = (f"trainer.num_workers={processes}", f"rollout.num_workers={processes}")
    given = (*GIVEN, *EVERYTHING, "placement=shared", *pools, f"total_steps={steps}", "resume=auto", *more)
    return (train if processes == 1 else train_here_on_ray)(folder, "fully_async", *given)


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.usefixtures("ray_here")
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_run_goes_on_with_another_number_of_processes(tmp_path: Path, before: int, after: int) -> None:
    calm = train(tmp_path / "calm", "fully_async", *GIVEN, *EVERYTHING, "total_steps=6")
    ran(tmp_path / "run", before, 3)
    resumed = ran(tmp_path / "run", after, 6)
    assert resumed.digest == calm.digest
    assert resumed.column("reward/mean") == calm.column("reward/mean")
    workers = {event["worker"] for event in resumed.events if event["event"] == "worker"}
    assert ("trainer-1" in workers) and [event for event in resumed.events if event["event"] == "rollback"]
    # The first of the two runs has evaluated its last version, too.
    due = [line["step"] for line in calm.metrics if line.get(KEY) is not None]
    assert len(due) >= 2
    assert [resumed.metrics[step].get(KEY) for step in due] == [calm.metrics[step][KEY] for step in due]
