"""Tests of the real controller with `placement=shared`, in virtual time: weights, turns and faults."""

import asyncio
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from separation.group import WorkerDied, WorkerFailed
from separation.supervise import DeadlineExceeded
from tests.support.toy import Disturbance
from tests.support.toy_pool import Fault, ListObserver, Timing, World, no_fault, once
from tests.support.toy_recovery import events, logged, rollbacks, run_controller, summary
from tests.support.toy_shared import SAMPLING, TRAINING, ToySharedTrainer, shared_config, shared_toys
from tests.unit.shared.shared_runs import MODES, check, first, shared


@pytest.mark.extended
@pytest.mark.parametrize(
    ("mode", "workers"),
    [*((mode, 1) for mode in MODES), ("sync", 2), ("stream", 3), ("one step off", 3), ("fully async", 2)],
)
def test_the_weights_of_separate_pools(mode: str, workers: int) -> None:
    check(shared(mode, workers), mode)


@pytest.mark.parametrize("what", ["", "lose-images"])
@pytest.mark.parametrize("mode", ["stream", "fully async"])
def test_batches_of_tickets_are_those_of_separate_pools(mode: str, what: str) -> None:
    """Of prompts of other lengths, so that batches take tickets out of order, and some of several optimizer steps."""
    batches: dict[str, Any] = {"ticket_size": 2, "rollout__tickets_per_batch": 3}
    batches["texts"] = tuple("x" * length for length in (30, 1, 20, 2, 10, 10))
    fault = first("shared-0", "generate", what, after=1) if what else no_fault
    found = shared(mode, 2, fault, **batches)
    check(found, mode, **batches)
    assert bool(what) == (found.table.retried > 0)
    assert any(list(event["batch"]) != sorted(event["batch"]) for event in found.tickets("RUNNING"))


@pytest.mark.extended
@pytest.mark.parametrize("workers", [1, 3])
def test_no_version_is_sent(workers: int) -> None:
    """But for the proof weights, which every worker must be sent."""
    calls: list[str] = []

    def heard(worker: str, method: str, number: int) -> None:
        calls.extend([method] * (method in ("receive", "keep_local")))

    found = shared("one step off", workers, heard)
    assert calls.count("receive") == workers
    assert calls.count("keep_local") == workers * len(found.published())


def test_training_is_never_behind_a_ticket_that_was_given_ahead() -> None:
    """With one worker: between the moment a group is handed over and its training, at most one ticket ends."""
    found = shared("one step off", 1, timing=Timing(generate=1.0, update=0.2, score=0.01))
    computed = found.observer.of("computed")
    assert {event["kind"] for event in computed} >= {"generate", "train"}
    handed = [event["time"] for event in found.tickets("HANDED")]
    for moment in handed:
        after = [event for event in computed if event["time"] > moment + 1e-9]
        first = next(index for index, event in enumerate(after) if event["kind"] in TRAINING)
        assert sum(event["kind"] in SAMPLING for event in after[:first]) <= 1


@pytest.mark.parametrize("limit", [None, 0.1])
@pytest.mark.parametrize("mode", ["one step off", "fully async"])
def test_the_end_of_a_step_waits_for_a_ticket_only_to_measure_its_kl(mode: str, limit: float | None) -> None:
    """With a limit every step is measured, else every tenth. What that waits is in the metrics of the step."""
    timing = Timing(seed=7, generate=1.0, spread=0.9, update=0.2, score=0.01)
    run = shared(mode, 2, timing=timing, algorithm__max_kl_per_update=limit)
    check(run, mode)
    training = [event["time"] for event in run.observer.of("computed") if event["kind"] in TRAINING]
    waits, measured = [line["timing/wait_ticket"] for line in run.lines], ["kl_per_update" in x for x in run.lines]
    assert measured[:2] == [True, limit is not None] and waits[0] > 0.0
    assert limit is None or sum(wait > 0.0 for wait in waits) >= 3
    for wait, measures, end in zip(waits, measured, run.observer.of("step"), strict=True):
        after_training = end["ended"] - max(time for time in training if time <= end["ended"])
        if not measures:
            assert wait == 0.0 and after_training == pytest.approx(0.0, abs=1e-9)
        elif mode == "one step off":  # The other has two optimizer steps, and training comes after the first.
            # The longest wait of a process; it waits twice, and each time all wait for the last of them.
            assert after_training / 2 <= wait + 1e-9 and wait <= after_training + 1e-9


@pytest.mark.extended
def test_one_worker_hides_the_time_of_rewards() -> None:
    """Step s+1 is sampled while the rewards of step s are made: of nothing else is there any to spare."""
    slow = Timing(generate=1.0, update=0.25, score=6.0)
    seconds = {mode: shared(mode, 1, timing=slow, reward__num_workers=8).seconds for mode in ("sync", "one step off")}
    work = 6 * 8 * (slow.generate + slow.update)
    assert seconds["one step off"] < work + 2 * slow.score
    assert seconds["sync"] > work + 6 * slow.score


@pytest.mark.parametrize(
    ("victim", "method"), [(0, "generate"), (1, "train"), (0, "add_up"), (1, "take_step"), (0, "keep_local")]
)
def test_the_death_of_a_process_ends_the_attempt_by_name(victim: int, method: str) -> None:
    """Also of one whose trainer rank has nothing to do. The run then goes on."""
    with pytest.raises(WorkerDied, match=f"trainer-{victim} died"):
        shared("one step off", 2, first(f"shared-{victim}", method, "kill", after=1))


@pytest.mark.parametrize(("mode", "workers"), [("sync", 3), ("stream", 1), ("one step off", 3), ("fully async", 1)])
def test_training_that_hangs_ends_the_run_by_name_as_in_a_separate_pool(mode: str, workers: int) -> None:
    """That call is named, and none of the tickets that wait for it."""
    with pytest.raises(DeadlineExceeded, match="update: train"):
        shared(mode, workers, first(f"shared-{workers // 2}", "train", "hang", after=1))


def test_a_worker_that_has_made_other_weights_ends_the_run_by_name() -> None:
    step = ToySharedTrainer.take_step

    def spoilt(self: ToySharedTrainer) -> Any:
        stats = step(self)
        if self.index == 1 and 2 in self.retained:
            self.retained[2]["layer.lora_B.weight"].view(torch.int32)[0, 0] ^= 1  # its last bit
        return stats

    said = "trainer-1 made other weights of version 2 than the first rank: .* wrong bytes in layer.lora_B.weight"
    with mock.patch.object(ToySharedTrainer, "take_step", spoilt), pytest.raises(WorkerFailed, match=said):
        shared("one step off", 2)


SHAKEN = Timing(seed=3, spread=0.8, update=0.3)


def ran(root: Path, workers: int, *faults: Fault) -> Path:
    """Returns `root`, in which a run or a part of it was made."""
    config = shared_config(1, workers, hand_over="stream", save__every=2, resume="auto")
    config.output_dir = str(root)

    def fault(worker: str, method: str, number: int) -> str | None:
        return next((what for one in faults if (what := one(worker, method, number))), None)

    with shared_toys():
        assert run_controller(config, root, World(SHAKEN, fault, ListObserver())) is None
    return root


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of one process."""
    return ran(tmp_path_factory.mktemp("calm") / "run", 1)


PLACES = ("generate", "train", "add_up", "take_step", "stage", "keep_local", "kept_state", "save")


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("workers", "faults"),
    [
        *((2, [first("shared-0", place, "kill", after=1)]) for place in PLACES),
        *((3, [first("shared-1", place, "kill", after=1)]) for place in PLACES[:4]),
        (1, [once("shared-0", "generate", 14, "kill")]),
        (1, [once("shared-0", "add_up", 4, "kill")]),
        (1, [once("shared-0", "save", 2, "kill")]),
        (2, [once("shared-0", "generate", 9, "hang")]),
        (3, [once("shared-1", "keep_local", 2, "hang")]),
        (2, [once("shared-0", "add_up", 4, "kill"), once("shared-0.1", "take_step", 1, "kill")]),
        (3, [once("shared-0", "take_step", 4, "kill"), once("shared-2", "train", 3, "kill")]),
        (2, [once("shared-0", "take_step", 4, "kill"), once("shared-1", "take_step", 4, "kill")]),
        (3, [once("shared-1", "generate", 3, "kill"), once("shared-1.1", "load", 2, "kill")]),
        (2, [once("shared-1", "generate", 6, "kill"), once("shared-0.1", "take_over", 1, "kill")]),
    ],
)
def test_the_weights_are_the_same_whoever_dies(tmp_path: Path, calm: Path, workers: int, faults: list[Fault]) -> None:
    found = ran(tmp_path / "found", workers, *faults)
    assert summary(found)["weights_digest"] == summary(calm)["weights_digest"]
    assert logged(found) == logged(calm)
    assert rollbacks(found) and len(events(found, "fault")) >= len(faults)


def test_at_most_the_step_under_way_and_the_one_whose_state_was_not_kept_are_trained_again(tmp_path: Path) -> None:
    """A death at the end of each step: every attempt begins at one of the two newest versions."""
    for number in range(1, 7):
        root = ran(tmp_path / f"run{number}", 2, once("shared-1", "take_step", number, "kill"))
        assert rollbacks(root) in ([number - 1], [max(0, number - 2)])


EVALUATED = {"evaluate__every": 1, "evaluate__before_training": True}
AHEAD = [mode for mode, settings in MODES.items() if settings["k"] > 0]


def stuck(first: int, last: float) -> Fault:
    """The reward's calls of these numbers, over all its workers, never end."""
    seen = [0]

    def fault(worker: str, method: str, number: int) -> str | None:
        if not worker.startswith("reward") or method != "score":
            return None
        seen[0] += 1
        return "hang" if first <= seen[0] <= last else None

    return fault


def losing(step: int) -> Disturbance:
    """Loses the trajectory of a ticket of `step` while that is trained and step + 1 is made."""

    async def lose(ctx: Any, groups: Any) -> None:
        while True:
            live = [ticket for ticket in ctx.table.live() if ticket.kind == "train"]
            due = [t for t in live if t.step == step == ctx.table.step and t.payload]
            if due and any(t.step == step + 1 and str(t.state) == "RUNNING" for t in live):
                due[-1].payload[1].lost = True
                return
            await asyncio.sleep(0.05)

    return lose


@pytest.mark.extended
@pytest.mark.parametrize("mode", AHEAD)
def test_an_evaluation_keeps_its_share_of_a_process_that_always_has_other_tickets(mode: str) -> None:
    """Every fourth ticket is of the evaluation, which has two."""
    found = shared(mode, 1, timing=Timing(generate=1.0, update=0.01, score=0.01), evaluate__every=3)
    given = [(event["time"], kind) for kind in ("train", "evaluation") for event in found.tickets("RUNNING", kind=kind)]
    kinds = [kind for _, kind in sorted(given)]
    places = [place for place, kind in enumerate(kinds) if kind == "evaluation"]
    assert len(places) == 4, "two evaluations, one of them when the training has ended"
    assert places[1] - places[0] == 4
    begun = found.tickets("PENDING", kind="evaluation")[0]["time"]
    assert sum(begun < time < sorted(given)[places[0]][0] for time, _ in given) <= 4


@pytest.mark.parametrize("mode", MODES)
def test_a_reward_that_is_stuck_for_good_ends_the_run_by_name(mode: str) -> None:
    with pytest.raises(DeadlineExceeded, match=r"score: .* was not done within its deadline of 5 s"):
        shared(mode, 1, stuck(5, float("inf")), deadlines__score=5.0, reward__retries=2)


@pytest.mark.parametrize("mode", MODES)
def test_all_of_it_at_once(mode: str) -> None:
    """Evaluations at every step, a reward that is stuck and comes back, and a trajectory lost where a mode is ahead."""
    found = shared(mode, 1, stuck(12, 13), disturb=losing(2), deadlines__score=5.0, reward__retries=3, **EVALUATED)
    check(found, mode, **EVALUATED)
    assert len(found.evaluated) == 7 and found.table.retried == (mode in AHEAD)
    assert len(found.observer.of("injected")) == found.groups["reward"].replaced == 2
