"""`placement=shared`: the weights of separate pools, bit for bit, from one process that samples and trains."""

from pathlib import Path

import pytest

from async_flowrl.observability.intervals import intersect, length, union
from tests.integration.runs import DELAYS, Run, train, train_here_on_ray

SHARED = "placement=shared"
CASES = {
    "sync": (),
    "stream": (),
    "one_step_off": (),
    "fully_async": ("max_staleness=3",),
    "one_step_off hand_over=batch": ("trainer.updates_per_batch=2",),
    "one_step_off algorithm=diffusion_nft": (),
    "one_step_off trainer.ema_decay=0.9": ("evaluate.every=2", "evaluate.before_training=true"),
}
"""Mode and a setting → further settings: every hand-over and depth, averaged policies, evaluations beside training."""

DEFAULT = ("sync", "fully_async")
"""The others repeat at length what the toys of tests/unit/shared do in virtual time."""


def both(folder: Path, case: str, *more: str) -> tuple[Run, Run]:
    mode, *setting = case.split(" ")
    given = (*setting, *CASES[case], *more)
    return train(folder / "separate", mode, *given), train(folder / "shared", mode, SHARED, *given)


@pytest.mark.parametrize(
    "case", [case if case in DEFAULT else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_the_weights_of_separate_pools(tmp_path: Path, case: str) -> None:
    separate, shared = both(tmp_path, case)
    assert shared.summary["placement"] == "shared"
    assert shared.digest == separate.digest
    assert shared.digests == separate.digests and len(set(shared.digests)) == 6
    assert shared.sample_log == separate.sample_log
    assert shared.column("staleness/max") == separate.column("staleness/max")
    evaluated = [[line.get("evaluation/reward/mean") for line in run.metrics] for run in (separate, shared)]
    assert evaluated[0] == evaluated[1]


@pytest.mark.slow
def test_one_process_computes_one_thing_at_a_time(tmp_path: Path) -> None:
    run = train(tmp_path, "one_step_off", SHARED, "ticket_size=2", *DELAYS)
    busy = {
        pool: union(
            (event["start"], event["end"])
            for event in run.events
            if event["event"] == "span" and event["worker"].startswith(pool) and event["name"] in names
        )
        for pool, names in (("rollout", {"generate", "decode"}), ("trainer", {"forward", "backward", "behaviour"}))
    }
    assert len(busy["rollout"]) > 10 and len(busy["trainer"]) >= 5
    assert length(intersect(busy["rollout"], busy["trainer"])) < 1e-3
    assert run.digests == train(tmp_path / "separate", "one_step_off", "ticket_size=2").digests


@pytest.mark.serial
@pytest.mark.usefixtures("ray_here")
def test_two_processes_that_sample_and_train(tmp_path: Path) -> None:
    pools = ("trainer.num_workers=2", "rollout.num_workers=2", "ticket_size=2")
    shared = train_here_on_ray(tmp_path / "shared", "one_step_off", SHARED, *pools)
    assert shared.digests == train(tmp_path / "threads", "one_step_off", "ticket_size=2").digests
    pids = {event["worker"]: event["pid"] for event in shared.events if event["event"] == "worker"}
    assert [pids[f"rollout-{index}"] == pids[f"trainer-{index}"] for index in (0, 1)] == [True, True]
    assert pids["rollout-0"] != pids["rollout-1"]
    for pool, name in (("rollout", "generate"), ("trainer", "backward")):
        busy = {e["worker"] for e in shared.events if e["event"] == "span" and e["name"] == name}
        assert busy == {f"{pool}-0", f"{pool}-1"}
