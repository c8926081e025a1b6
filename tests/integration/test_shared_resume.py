"""Tests of a resume with `placement=shared` and another number of processes: the weights are the undisturbed ones."""

from pathlib import Path

import pytest

from tests.integration.runs import Run, train, train_here_on_ray

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
