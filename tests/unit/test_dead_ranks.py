"""Tests of a trainer rank that dies in a step: the others compute its share, a successor joins, the weights are equal.

In virtual time; `tests/unit/training/test_killed_ranks.py` kills real processes.
"""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from async_flowrl.controller import collect
from async_flowrl.controller.replica_calls import ReplicaCalls
from async_flowrl.training.manifests import NotThePlan, check_plan, missing
from async_flowrl.training.messages import Manifest
from separation.group import WorkerDied, WorkerFailed
from tests.support.toy import toy_config, virtual
from tests.support.toy_pool import Fault, ListObserver, Timing, World, once
from tests.support.toy_recovery import rollbacks, run_controller
from tests.unit.dying_ranks import MODES, SHAKEN, check, config, killing

pytestmark = pytest.mark.usefixtures("ranks_meet")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("method", "number"), [("train", 3), ("add_up", 3), ("take_step", 3), ("train", 1)])
def test_a_rank_that_dies_costs_what_it_had_not_handed_in(mode: str, method: str, number: int) -> None:
    found = virtual(config(mode, 3), SHAKEN, killing(("trainer-1", method, number)))
    check(found, mode)
    assert found.observer.of("injected") and len(found.observer.of("fault")) == 1
    again = found.observer.of("recomputed")
    if mode != "two updates":  # there the later one had groups for the dead rank, too
        assert len(again) == (method != "take_step"), "what was added up needs no second time"
    assert all(list(event["lost"]) == ["trainer-1"] or event["update"] for event in again)
    assert all(event["parts"] > 0 for event in again)
    (rejoined,) = found.observer.of("rejoined")
    assert rejoined["worker"] == "trainer-1.1" and rejoined["peer"] == "trainer-0"
    late = [step for step, _, _ in found.groups["trainer"].workers[1].target.trained]
    assert late and min(late) == rejoined["step"], "the successor trains from then on"


@pytest.mark.parametrize(("mode", "method"), [("batch", "train"), ("two updates", "proximal"), ("stream", "take_step")])
def test_ranks_that_die_at_the_same_moment_cost_their_shares(mode: str, method: str) -> None:
    """Each of two calls finds both of them dead."""
    deaths = killing(("trainer-1", method, 2), ("trainer-2", method, 2))
    found = virtual(config(mode, 4), Timing(update=0.3), deaths)
    check(found, mode)
    assert len(found.observer.of("fault")) == len(found.observer.of("rejoined")) == 2


def test_what_a_dead_rank_had_fetched_is_not_told_by_the_numbers_of_another() -> None:
    found = virtual(config("batch", 3), SHAKEN, killing(("trainer-1", "take_step", 3)))
    assert [event["tickets"] for event in found.observer.of("fetched", worker="trainer-1")][-1] == 0


def test_a_rank_that_raises_while_another_is_dead_ends_the_step_by_its_name() -> None:
    """Nobody knows what is in its sum: that the other is dead is no reason for going on with it."""

    async def kill_the_idle(ctx: Any, groups: Any) -> None:
        idle, busy = groups["trainer"].workers[1:]
        while busy.calls.get("train", 0) < 3 or idle.running:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        idle.kill()

    timing = Timing(update=0.3, slow={"trainer-2": 3.0})
    with pytest.raises(WorkerFailed, match=r"trainer-2\.train raised RuntimeError: injected"):
        virtual(config("batch", 3), timing, once("trainer-2", "train", 3, "raise"), disturb=kill_the_idle)


def test_the_last_one_goes_on_alone_until_a_successor_comes() -> None:
    deaths = killing(("trainer-1", "train", 2), ("trainer-2", "add_up", 2))
    found = virtual(config("stream", 3), SHAKEN, deaths)
    check(found, "stream")
    assert len(found.observer.of("rejoined")) == 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", ["train", "add_up", "take_step", "seal"])
def test_with_a_rank_its_replica_is_ended_and_the_other_replicas_go_on(mode: str, method: str) -> None:
    """Two ranks hold one copy of the base. Nobody is called in their place."""
    arrange = ReplicaCalls._arrange

    def in_twos(calls: ReplicaCalls, per_replica: int) -> None:
        arrange(calls, min(2, len(calls.workers.workers)))

    with mock.patch.object(ReplicaCalls, "_arrange", in_twos):
        found = virtual(config(mode, 4), SHAKEN, killing(("trainer-0", method, 3)))
    check(found, mode)
    assert [event["worker"] for event in found.observer.of("fault")] == ["trainer-0", "trainer-1"]
    assert [event["worker"] for event in found.observer.of("sender")] == ["trainer-2"]
    assert not found.observer.of("rejoined") and found.groups["trainer"].replaced == 0


@pytest.mark.parametrize("method", ["train", "add_up", "take_step"])
def test_with_the_last_rank_the_step_ends_by_name(method: str) -> None:
    """Then the run goes back to its checkpoint (tests/unit/test_recovery.py)."""
    with pytest.raises(WorkerDied, match=r"trainer-[01] died"):
        virtual(config("batch", 2), SHAKEN, killing(("trainer-0", method, 2), ("trainer-1", method, 2)))


def test_a_rank_that_raises_is_not_taken_for_dead() -> None:
    with pytest.raises(WorkerFailed, match="injected"):
        virtual(
            config("batch", 2), SHAKEN, lambda w, m, n: "raise" if (w, m, n) == ("trainer-1", "add_up", 2) else None
        )


def schedule(seed: int) -> tuple[str, int, Fault]:
    """Up to three deaths of ranks, but never of all, anywhere in a step or while they send, also of successors; a
    rollout worker dies, too."""
    rng = random.Random(seed)
    mode, ranks = rng.choice(list(MODES)), rng.choice([2, 3, 4])
    spared = rng.randrange(ranks)
    mortal = [rank for rank in range(ranks) if rank != spared]
    places = ["train", "add_up", "take_step", "proximal", "stage", "seal", "payload"]
    deaths = {
        (f"trainer-{rng.choice(mortal)}{rng.choice(['', '', '.1'])}", method, rng.randrange(1, 9))
        for method in rng.choices(places, k=rng.choice([1, 2, 3]))
    }
    return mode, ranks, killing(*deaths, ("rollout-0", "generate", rng.randrange(2, 9)))


@pytest.mark.chaos
@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 80), marks=pytest.mark.slow)], ids=len)
def test_schedules_of_deaths(seeds: range) -> None:
    recomputed = moved = 0
    for seed in seeds:
        mode, ranks, fault = schedule(seed)
        found = virtual(config(mode, ranks), Timing(seed=seed, spread=0.9, update=0.3), fault)
        check(found, mode)
        recomputed += len(found.observer.of("recomputed"))
        moved += len(found.observer.of("sender"))
    assert recomputed >= len(seeds) // 4 and moved >= len(seeds) // 4


KEPT = {0: Manifest(3, 0, 7, ((0, 0), (0, 1))), 1: Manifest(3, 0, 7, ((1, 0),))}
PLANNED = {0: 2, 1: 1}


def named(**changes: Manifest) -> dict[str, Manifest]:
    return {f"trainer-{rank}": manifest for rank, manifest in KEPT.items()} | changes


@pytest.mark.parametrize(
    ("manifests", "said"),
    [
        (named(extra=KEPT[1]), "part 0 of group 1 is in the sums of trainer-1 and of extra"),
        (named(extra=Manifest(3, 0, 6, ())), "extra has a sum of step 3, optimizer step 0, attempt 6"),
        (named(extra=Manifest(2, 0, 7, ())), "extra has a sum of step 2"),
        (named(extra=Manifest(3, 0, 7, ((1, 1),))), "extra has added part 1 of group 1, which was not planned"),
        ({"trainer-0": KEPT[0]}, "part 0 of group 1 is in no rank's sum"),
    ],
)
def test_sums_that_are_not_the_plan_are_refused_by_name(manifests: dict[str, Manifest], said: str) -> None:
    check_plan(3, 0, 7, PLANNED, named())
    with pytest.raises(NotThePlan, match=said):
        check_plan(3, 0, 7, PLANNED, manifests)
    assert missing(PLANNED, [KEPT[0]]) == {1: {0}} and missing(PLANNED, KEPT.values()) == {}


def keeping(self: collect.Sums, buried: Any) -> None:
    """The mutant: what a dead rank had added counts as if it were there."""


@pytest.mark.parametrize(
    "mutant",
    [
        lambda: mock.patch.object(collect.Sums, "forget", keeping),
        lambda: mock.patch.object(collect, "missing", return_value={}),
    ],
)
def test_a_mutant_that_counts_a_dead_ranks_sum_is_caught(mutant: Callable[[], Any]) -> None:
    with mutant(), pytest.raises((NotThePlan, WorkerFailed), match=r"is in no rank's sum|is not Account"):
        virtual(config("batch", 3), SHAKEN, killing(("trainer-1", "add_up", 3)))


def test_a_rank_that_died_before_the_last_one_loads_again_with_it(tmp_path: Path) -> None:
    """The run goes back with a rank whose successor has not come yet."""
    kill, calls = killing(("trainer-1", "train", 4), ("trainer-0", "take_step", 4)), list[tuple[str, str]]()

    def fault(worker: str, method: str, number: int) -> str | None:
        calls.append((worker, method))
        return kill(worker, method, number)

    given = toy_config(1, steps=6, trainer__num_workers=2, save__every=2, monitor__progress=False)
    assert run_controller(given, tmp_path, World(Timing(update=0.3), fault, ListObserver())) is None
    assert len(rollbacks(tmp_path)) == 1
    restored = [worker for worker, method in calls if method == "restore"]
    assert len(restored) == 2 and {(worker, "load") for worker in restored} <= set(calls)
