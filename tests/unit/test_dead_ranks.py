"""Tests of a trainer rank that dies in a step: the others compute its share, a successor joins, the weights are equal.

In virtual time; `tests/unit/training/test_killed_ranks.py` kills real processes.
"""

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from async_flowrl.controller import collect
from async_flowrl.controller.replica_calls import ReplicaCalls
from async_flowrl.training.checkpoint_folder import checkpoint_step, written
from async_flowrl.training.manifests import NotThePlan, check_plan, missing
from async_flowrl.training.messages import Manifest
from separation.group import WorkerDied, WorkerFailed
from tests.support.toy import ToyRun, calm_run, toy_config, virtual
from tests.support.toy_pool import Fault, ListObserver, Timing, World, once
from tests.support.toy_recovery import events, rollbacks, run_controller, summary, toy_ranks_meet

SHAKEN = Timing(seed=7, spread=0.9, update=0.3)
MODES: dict[str, dict[str, Any]] = {
    "batch": {"hand_over": "batch"},
    "two updates": {"hand_over": "batch", "trainer__updates_per_batch": 2},
    "stream": {"hand_over": "stream"},
}


@pytest.fixture(autouse=True)
def _toy_ranks_meet() -> Iterator[None]:
    with toy_ranks_meet():
        yield


def config(mode: str, ranks: int) -> Any:
    return toy_config(1, steps=6, prompts_per_step=8, trainer__num_workers=ranks, **MODES[mode])


def killing(*deaths: tuple[str, str, int]) -> Fault:
    return lambda worker, method, number: "kill" if (worker, method, number) in deaths else None


def undisturbed(mode: str) -> ToyRun:
    return calm_run(config(mode, 1), SHAKEN)


def check(found: ToyRun, mode: str) -> None:
    calm = undisturbed(mode)
    assert found.digest == calm.digest and found.published() == calm.published()
    once = found.tickets("TRAINED")
    assert len(once) == len(calm.tickets("TRAINED")) == len({event["ordinal"] for event in once})


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
@pytest.mark.parametrize(
    ("method", "number"),
    [("train", 3), ("add_up", 3), ("take_step", 3), ("stage", 4), ("seal", 4), ("payload", 4), ("state", 1)],
)
def test_the_first_rank_may_die_wherever_it_is_and_the_next_one_sends_the_same(
    mode: str, method: str, number: int
) -> None:
    """It has stepped or not, has staged, sealed or sent its version; nothing goes back to a checkpoint."""
    deaths = [("trainer-0", method, number)] + [("trainer-2", "train", 1)] * (method == "state")
    found = virtual(config(mode, 3), SHAKEN, killing(*deaths))
    assert len(found.observer.of("injected")) == len(deaths)
    check(found, mode)
    (moved,) = found.observer.of("sender")
    assert (moved["worker"], moved["before"]) == ("trainer-1", "trainer-0")
    if number < 4:
        assert "trainer-0.1" in {event["worker"] for event in found.observer.of("rejoined")}
    staged = [event["version"] for event in found.observer.of("version", state="staged")]
    assert staged == list(range(7)), "each version once"


def test_the_role_goes_from_one_first_rank_to_the_next() -> None:
    deaths = killing(("trainer-0", "train", 2), ("trainer-1", "seal", 2), ("trainer-0.1", "train", 2))
    found = virtual(config("stream", 3), SHAKEN, deaths)
    check(found, "stream")
    moves = [(event["before"], event["worker"]) for event in found.observer.of("sender")]
    assert moves[0] == ("trainer-0", "trainer-1") and len(moves) == 2 and moves[1][0] == "trainer-1"


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


@pytest.mark.parametrize("method", ["hold", "payload", "train"])
def test_an_evaluated_version_outlives_its_sender(method: str) -> None:
    """With evaluations, whose versions are older than those that are trained on by the time they are sent."""
    given = config("batch", 3)
    given.evaluate.every, given.max_staleness = 2, 0
    calm = config("batch", 1)
    calm.evaluate.every, calm.max_staleness = 2, 0
    number = {"hold": 1, "payload": 5, "train": 5}[method]
    found = virtual(given, SHAKEN, killing(("trainer-0", method, number)))
    expected = calm_run(calm, SHAKEN)
    assert found.observer.of("injected") and len(found.observer.of("sender")) == 1
    assert found.digest == expected.digest and found.published() == expected.published()
    assert [one.means() for one in found.evaluated] == [one.means() for one in expected.evaluated]


def test_a_newcomer_keeps_no_version_that_its_peers_have_let_go_of() -> None:
    """An evaluation ends, and its version is let go of, while the newcomer takes over a state that has a copy of it."""
    given = toy_config(1, steps=12, prompts_per_step=4, hand_over="batch", trainer__num_workers=2)
    given.evaluate.every = 1

    def fault(worker: str, method: str, number: int) -> str | None:
        late = {("trainer-1", "train", 2): "kill", ("trainer-1.1", "take_over", 1): "delay"}
        return late.get((worker, method, number))

    found = virtual(given, SHAKEN, fault)
    (rejoined,) = found.observer.of("rejoined")
    assert rejoined["worker"] == "trainer-1.1" and len(found.evaluated) == 12
    first, second = (worker.target.versions.kept for worker in found.groups["trainer"].workers)
    assert sorted(first) == sorted(second)


@pytest.mark.parametrize("number", [6, 7, 9])
def test_a_newcomer_is_told_what_its_peer_has_not_done_yet(number: int) -> None:
    """The peer, whose lane is busy, lets go of an evaluated version only after it has handed over its state."""
    given = toy_config(3, steps=14, prompts_per_step=4, hand_over="batch", trainer__num_workers=2)
    given.evaluate.every = 3

    def fault(worker: str, method: str, count: int) -> str | None:
        if (worker, method) == ("trainer-0", "let_go"):
            return "delay"
        return "kill" if (worker, method, count) == ("trainer-1", "train", number) else None

    found = virtual(given, SHAKEN, fault)
    assert found.observer.of("rejoined")
    kept = found.groups["trainer"].workers[1].target.versions.kept
    assert set(kept) == {("policy", 12)}, "that of the last evaluation"


def whole_run(root: Path, *deaths: tuple[str, str, int], ranks: int = 2) -> Path:
    """A controller with its checkpoints, one every two steps, in `root`."""
    given = toy_config(1, steps=6, trainer__num_workers=ranks, save__every=2, save__keep=9, monitor__progress=False)
    assert run_controller(given, root, World(Timing(update=0.3), killing(*deaths), ListObserver())) is None
    return root


def checkpoints(root: Path) -> list[tuple[int, bytes]]:
    """Step and weights of every checkpoint."""
    return [
        (checkpoint_step(path), (path / "weights.safetensors").read_bytes())
        for path in reversed(written(root / "checkpoints"))
    ]


@pytest.mark.parametrize(("method", "number"), [("snapshot", 2), ("save", 2), ("save", 4), ("weights_digest", 1)])
def test_a_checkpoint_is_written_by_the_next_rank_if_its_writer_dies(method: str, number: int, tmp_path: Path) -> None:
    found = whole_run(tmp_path / "found", ("trainer-0", method, number))
    calm = whole_run(tmp_path / "calm", ranks=1)
    assert rollbacks(found) == [] and [event["worker"] for event in events(found, "fault")] == ["trainer-0"]
    assert checkpoints(found) == checkpoints(calm) and [step for step, _ in checkpoints(found)] == [0, 2, 4, 6]
    assert summary(found)["weights_digest"] == summary(calm)["weights_digest"]


def test_a_checkpoint_whose_copies_died_is_missed_and_the_next_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deaths = [("trainer-0", "save", 2), ("trainer-1", "save", 1)]
    found, calm = whole_run(tmp_path / "found", *deaths, ranks=3), whole_run(tmp_path / "calm", ranks=1)
    assert rollbacks(found) == [] and "checkpoint 2 could not be written (1 in a row)" in caplog.text
    assert checkpoints(found) == [one for one in checkpoints(calm) if one[0] != 2]


@pytest.mark.parametrize("method", ["train", "add_up", "take_step"])
def test_with_the_last_rank_the_step_ends_by_name(method: str) -> None:
    """Then the run goes back to its checkpoint (tests/unit/test_recovery.py)."""
    with pytest.raises(WorkerDied, match=r"trainer-[01] died"):
        virtual(config("batch", 2), SHAKEN, killing(("trainer-0", method, 2), ("trainer-1", method, 2)))


@pytest.mark.parametrize("what", ["kill", "raise", "hang"])
def test_a_successor_that_does_not_come_is_named_and_the_others_go_on(what: str) -> None:
    given = toy_config(1, steps=24, prompts_per_step=4, trainer__num_workers=2, hand_over="batch")
    given.deadlines.load = 5

    def fault(worker: str, method: str, number: int) -> str | None:
        if (worker, method, number) == ("trainer-1", "train", 2):
            return "kill"
        return what if method == "load" and worker in ("trainer-1.1", "trainer-1.2") else None

    found = virtual(given, SHAKEN, fault)
    assert found.digest == calm_run(toy_config(1, steps=24, prompts_per_step=4, hand_over="batch"), SHAKEN).digest
    kinds = {"kill": "WorkerDied", "raise": "WorkerFailed", "hang": "DeadlineExceeded"}
    faults = [(event["worker"], event["kind"]) for event in found.observer.of("fault")]
    assert faults[1:] == [(name, kinds[what]) for name in ("trainer-1.1", "trainer-1.2")]
    assert [event["worker"] for event in found.observer.of("rejoined")] == ["trainer-1.3"]


@pytest.mark.parametrize("successors", [3, 1])
def test_after_some_successors_no_other_is_called(successors: int, caplog: pytest.LogCaptureFixture) -> None:
    given = toy_config(1, steps=24, prompts_per_step=4, trainer__num_workers=2, hand_over="batch")
    if successors != 3:
        given.limits.successors = successors

    def fault(worker: str, method: str, number: int) -> str | None:
        first = (worker, method, number) == ("trainer-1", "train", 2)
        return "kill" if first or (method == "load" and worker.startswith("trainer-1.")) else None

    found = virtual(given, SHAKEN, fault)
    assert not found.observer.of("rejoined") and len(found.observer.of("fault")) == 1 + successors
    assert "no further successor is started" in caplog.text


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


def unchecked(*arguments: Any) -> None:
    """The mutant: nobody looks at the manifests."""


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


def test_an_evaluated_version_outlives_a_successor_that_sends_it() -> None:
    """The successor has made no such version: it takes the copy over from its peer."""
    given, calm = config("batch", 2), config("batch", 1)
    for one in (given, calm):
        one.total_steps, one.evaluate.every, one.max_staleness, one.evaluate.before_training = 20, 16, 0, True

    async def disturb(ctx: Any, groups: Any) -> None:
        seen = ctx.observer.of
        while not seen("evaluation") and ctx.table.step < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        groups["trainer"].workers[1].kill()
        while not seen("rejoined"):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        groups["trainer"].workers[0].kill()
        while not seen("sender"):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        groups["rollout"].workers[0].kill()

    found, expected = virtual(given, SHAKEN, disturb=disturb), virtual(calm, SHAKEN)
    assert [event["worker"] for event in found.observer.of("sender")] == ["trainer-1.1"]
    assert found.digest == expected.digest
    assert [one.means() for one in found.evaluated] == [one.means() for one in expected.evaluated]


def test_a_canary_that_is_lost_with_its_sender_is_made_by_the_next_rank() -> None:
    async def lose(ctx: Any, groups: Any) -> None:
        while ctx.table.step < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        ctx.weights.proof.canary.payload.lost = True
        groups["rollout"].workers[0].kill()

    found = virtual(config("stream", 2), SHAKEN, killing(("trainer-0", "canary_again", 1)), disturb=lose)
    check(found, "stream")
    assert found.observer.of("injected") and [e["worker"] for e in found.observer.of("sender")] == ["trainer-1"]
    assert [e["worker"] for e in found.observer.of("replaced")] == ["rollout-0", "trainer-0"]


@pytest.mark.parametrize("method", ["canary", "seal", "payload"])
def test_the_first_canary_is_made_by_the_next_rank_if_its_maker_dies(method: str) -> None:
    """Before anything is published there is nothing that another rank would have to send in its place."""
    found = virtual(config("stream", 3), SHAKEN, killing(("trainer-0", method, 1)))
    check(found, "stream")
    assert [event["worker"] for event in found.observer.of("fault")] == ["trainer-0"]
    assert [event["worker"] for event in found.observer.of("rejoined")] == ["trainer-0.1"]
    assert not found.observer.of("sender")


def test_without_a_rank_that_makes_the_first_canary_the_attempt_ends_by_name() -> None:
    with pytest.raises(WorkerDied, match=r"trainer-[01] died"):
        virtual(config("batch", 2), SHAKEN, killing(("trainer-0", "canary", 1), ("trainer-1", "canary", 1)))


def test_a_checkpoint_is_copied_by_ranks_that_do_not_end_together(tmp_path: Path) -> None:
    arrange = ReplicaCalls._arrange

    def in_twos(calls: ReplicaCalls, per_replica: int) -> None:
        arrange(calls, min(2, len(calls.workers.workers)))

    with mock.patch.object(ReplicaCalls, "_arrange", in_twos):
        found = whole_run(tmp_path / "found", ("trainer-0", "save", 2), ranks=4)
    calm = whole_run(tmp_path / "calm", ranks=1)
    assert rollbacks(found) == [] and checkpoints(found) == checkpoints(calm)
