"""Tests of the real controller with `placement=shared`, in virtual time: weights, turns and faults."""

from typing import Any
from unittest import mock

import pytest
import torch

from separation.group import WorkerDied, WorkerFailed
from separation.supervise import DeadlineExceeded
from tests.support.toy_pool import Fault, Timing, no_fault, once
from tests.support.toy_shared import SAMPLING, TRAINING, ToySharedTrainer, shared_config
from tests.unit.shared.runs import MODES, check, first, shared


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_the_weights_of_separate_pools(mode: str, workers: int) -> None:
    check(shared(mode, workers), mode)


@pytest.mark.parametrize("what", ["", "kill", "lose-images"])
@pytest.mark.parametrize("mode", ["stream", "fully async"])
def test_batches_of_tickets_are_those_of_separate_pools(mode: str, what: str) -> None:
    """Of prompts of other lengths, so that batches take tickets out of order, and some of several optimizer steps."""
    batches: dict[str, Any] = {"ticket_size": 2, "rollout__tickets_per_batch": 3}
    batches["texts"] = tuple("x" * length for length in (30, 1, 20, 2, 10, 10))
    fault = first("shared-0", "generate_together", what, after=1) if what else no_fault
    found = shared(mode, 2, fault, **batches)
    check(found, mode, **batches)
    assert bool(what) == (found.table.retried > 0)
    assert any(list(event["batch"]) != sorted(event["batch"]) for event in found.tickets("RUNNING"))


@pytest.mark.parametrize("workers", [1, 3])
def test_no_version_is_sent(workers: int) -> None:
    """But for the canary, which every worker must be sent."""
    calls: list[str] = []

    def heard(worker: str, method: str, number: int) -> None:
        calls.extend([method] * (method in ("receive", "keep_own")))

    found = shared("one step off", workers, heard)
    assert calls.count("receive") == workers
    assert calls.count("keep_own") == workers * len(found.published())


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


@pytest.mark.parametrize("mode", ["stream", "one step off"])
def test_a_group_goes_to_a_process_that_is_idle_and_not_to_one_in_a_long_ticket(mode: str) -> None:
    """A ticket of the first of two takes a hundred times as long as the others. Its own group comes after it."""
    timing = Timing(generate=0.2, update=0.3, score=0.01)
    found = shared(mode, 2, once("shared-0", "generate", 2, "slow"), timing)
    check(found, mode)
    (long,) = [
        event for event in found.observer.of("computed", worker="shared-0") if event["time"] > event["start"] + 1
    ]
    since, until = long["start"] + timing.generate, long["time"] + 2 * timing.score
    assert long["kind"] == "generate" and until - since > 10.0
    handed = {(event["step"], event["group"]) for event in found.tickets("HANDED") if since < event["time"] < until}
    second = found.groups["shared"].workers[1].target.trainer
    assert len(handed) >= 4 and handed <= {(step, group) for step, group, _ in second.trained}


@pytest.mark.parametrize("limit", [None, 0.1])
@pytest.mark.parametrize("mode", ["one step off", "fully async"])
def test_the_end_of_a_step_waits_for_a_ticket_only_to_limit_its_kl(mode: str, limit: float | None) -> None:
    """With a limit the KL of every step is measured before its end. What that waits is in the metrics of the step.

    Without one, only the step after a measured one may wait for its measurement, as for any unit of training.
    """
    timing = Timing(seed=7, generate=1.0, spread=0.9, update=0.2, score=0.01)
    run = shared(mode, 2, timing=timing, algorithm__max_kl_per_update=limit)
    check(run, mode)
    training = [event["time"] for event in run.observer.of("computed") if event["kind"] in TRAINING[:-1]]
    measured = [event["time"] for event in run.observer.of("computed") if event["kind"] == "measure_kl"]
    assert TRAINING[-1] == "measure_kl" and bool(measured) == (limit is None)
    waits = [line["timing/wait_ticket"] for line in run.lines]
    if limit is not None:
        assert sum(wait > 0.0 for wait in waits) >= 3 and waits[0] > 0.0
    for wait, end in zip(waits, run.observer.of("step"), strict=True):
        after_training = end["ended"] - max(time for time in training if time <= end["ended"])
        if limit is None:
            until = [time for time in (*training, *measured) if time <= end["ended"]]
            waits_for_it = any(end["started"] < time <= end["ended"] for time in measured)
            assert wait == 0.0 and end["ended"] - max(until) == pytest.approx(0.0, abs=1e-9)
            assert waits_for_it or after_training == pytest.approx(0.0, abs=1e-9)
        elif mode == "one step off":  # The other has two optimizer steps, and training comes after the first.
            # The longest wait of a process; it waits twice, and each time all wait for the last of them.
            assert after_training / 2 <= wait + 1e-9 and wait <= after_training + 1e-9


def killed_measuring(times: int) -> Fault:
    """The first so many processes that measure a KL die of it."""
    left = ["kill"] * times
    return lambda worker, method, number: left.pop() if method == "measure_kl" and left else None


@pytest.mark.parametrize(("mode", "deaths"), [("stream", 0), ("one step off", 2)])
def test_a_kl_that_is_measured_after_its_step_is_that_of_the_step(mode: str, deaths: int) -> None:
    """It is in the line of its step. One process measures it, as a part of the next step; if it dies, another one."""
    after, before = shared(mode, 3, killed_measuring(deaths)), shared(mode, 3, algorithm__max_kl_per_update=0.1)
    check(after, mode)
    assert after.lines[0]["kl_per_update"] == before.lines[0]["kl_per_update"] > 0.0
    assert not any("kl_per_update" in line for line in after.lines[1:]), "each tenth step is measured"
    (unit,) = [event for event in after.observer.of("computed") if event["kind"] == "measure_kl"][deaths:]
    first, second = after.observer.of("step")[:2]
    assert first["ended"] <= unit["start"] and unit["time"] < second["ended"]


@pytest.mark.parametrize("score", [3.0, 8.0])
def test_a_measurement_does_not_hide_the_wait_for_images(score: float) -> None:
    """The groups of the next step come while the first rank measures, which takes 5 seconds, or after that."""
    slow: Fault = lambda worker, method, number: "delay" if method == "measure_kl" else None  # noqa: E731
    run = shared("stream", 2, slow, Timing(generate=0.1, score=score), reward__num_workers=8)
    began = run.observer.of("step")[0]["ended"]
    handed = min(event["time"] for event in run.tickets("HANDED") if event["step"] == 1)
    (unit,) = [event for event in run.observer.of("computed") if event["kind"] == "measure_kl"]
    assert began <= unit["start"] < min(handed, unit["time"] - 4.9) and (handed < unit["time"]) == (score == 3.0)
    assert run.lines[1]["timing/wait_rollout"] >= handed - began - 1e-9


def test_the_kl_of_the_first_of_two_optimizer_steps_is_in_the_line_of_their_step() -> None:
    """Of twelve optimizer steps in six training steps the first and the eleventh are measured, the latter at once."""
    run = shared("fully async", 2)
    units = [event["time"] for event in run.observer.of("computed") if event["kind"] == "measure_kl"]
    ends = [event["ended"] for event in run.observer.of("step")]
    assert len(units) == 1 and units[0] < ends[0]
    assert [step for step, line in enumerate(run.lines) if "kl_per_update" in line] == [0, 5]


def test_a_kl_is_measured_by_the_process_whose_ticket_ends_first() -> None:
    """One ticket, begun before the end of the step, takes longer than the next step does."""
    run = shared("one step off", 2, once("shared-0", "generate", 5, "slow"), Timing(generate=0.2, update=0.3))
    (unit,) = [event for event in run.observer.of("computed") if event["kind"] == "measure_kl"]
    assert unit["worker"] == "shared-1" and run.lines[0]["kl_per_update"] > 0.0


def test_the_kl_of_the_last_step_is_measured_before_its_end() -> None:
    """A checkpoint follows it. test_shared_recovery.py has the runs that are stopped after another step."""
    run = shared("one step off", 2, steps=1)
    check(run, "one step off", steps=1)
    assert run.lines[0]["kl_per_update"] > 0.0
    assert not any(event["kind"] == "measure_kl" for event in run.observer.of("computed"))


def test_a_kl_is_not_measured_if_all_that_took_its_step_have_died(caplog: pytest.LogCaptureFixture) -> None:
    """The second process dies in step 0. Its successor takes part from step 1 on, and alone survives the first one."""
    early, late = once("shared-1", "train", 1, "kill"), once("shared-0", "measure_kl", 1, "kill")
    run = shared("one step off", 2, lambda *call: early(*call) or late(*call))
    check(run, "one step off")
    assert "step 0: its KL is not measured, as all that have taken it died" in caplog.text
    assert not any("kl_per_update" in line for line in run.lines[:-1])


def test_a_measurement_that_hangs_ends_the_run_by_name() -> None:
    with pytest.raises(DeadlineExceeded, match="update: KL of step 0"):
        shared("one step off", 2, lambda worker, method, number: "hang" if method == "measure_kl" else None)


def test_one_worker_hides_the_time_of_rewards() -> None:
    """Step s+1 is sampled while the rewards of step s are made: of nothing else is there any to spare."""
    slow = Timing(generate=1.0, update=0.25, score=6.0)
    seconds = {mode: shared(mode, 1, timing=slow, reward__num_workers=8).seconds for mode in ("sync", "one step off")}
    work = 6 * 8 * (slow.generate + slow.update)
    assert seconds["one step off"] < work + 2 * slow.score
    assert seconds["sync"] > work + 6 * slow.score


FAULTS = [
    ("generate", "kill"),
    ("generate", "hang"),
    ("generate", "slow"),
    ("generate/evaluation", "kill"),
    ("train", "kill"),
    ("add_up", "kill"),
    ("take_step", "kill"),
    ("keep_own", "kill"),
]


@pytest.mark.chaos
@pytest.mark.parametrize(("method", "what"), FAULTS)
@pytest.mark.parametrize(
    ("victim", "mode"),
    [(0, "sync"), (0, "one step off"), pytest.param(1, "sync", marks=pytest.mark.slow), (1, "one step off")],
)
def test_the_death_of_one_is_that_of_both_and_costs_its_share(victim: int, mode: str, method: str, what: str) -> None:
    """Also that of the first, which sends the weights: the next one does from then on."""
    evaluated = {"evaluate__every": 1, "evaluate__before_training": True} if "evaluation" in method else {}
    found = shared(mode, 3, first(f"shared-{victim}", method, what, after=0 if evaluated else 1), **evaluated)
    check(found, mode, **evaluated)
    assert found.observer.of("injected")
    if what == "slow":
        return
    replaced = [event["worker"] for event in found.observer.of("replaced")]
    assert replaced == [f"shared-{victim}"], "one process is replaced once, for both"
    faults = {event["worker"] for event in found.observer.of("fault")}
    assert faults == {f"rollout-{victim}", f"trainer-{victim}"}
    (rejoined,) = found.observer.of("rejoined")
    assert rejoined["worker"] == f"trainer-{victim}.1"
    assert {event["worker"] for event in found.observer.of("sender")} == ({"trainer-1"} if victim == 0 else set())
    late = [event for event in found.tickets("SCORING") if event["worker"] == f"rollout-{victim}.1"]
    assert late, "the newcomer samples, too"


@pytest.mark.parametrize("method", ["generate", "train_last"])
def test_the_death_of_the_only_one_ends_the_attempt_by_name(method: str) -> None:
    """Then the run goes back to its checkpoint (test_shared_recovery.py)."""
    with pytest.raises(WorkerDied, match="trainer-0"):
        shared("one step off", 1, once("shared-0", method, 3, "kill"))


def test_a_ticket_that_hangs_is_found_without_the_time_that_training_may_take() -> None:
    found = shared("one step off", 2, once("shared-1", "generate", 4, "hang"))
    check(found, "one step off")
    (hung,), (replaced,) = found.observer.of("injected"), found.observer.of("replaced")
    longest = 2 * 2 * shared_config(1, 2).deadlines.generate  # two tickets, and just missed when the worker was asked
    assert replaced["time"] - hung["time"] <= longest


@pytest.mark.parametrize(("workers", "method"), [(1, "train_last"), (3, "train")])
@pytest.mark.parametrize("mode", MODES)
def test_training_that_hangs_ends_the_run_by_name_as_in_a_separate_pool(mode: str, workers: int, method: str) -> None:
    """That call is named, and none of the tickets that wait for it."""
    with pytest.raises(DeadlineExceeded, match="update: train"):
        shared(mode, workers, first(f"shared-{workers // 2}", method, "hang", after=1))


def test_a_worker_that_never_says_which_versions_it_has_is_replaced() -> None:
    check(found := shared("one step off", 3, once("shared-1", "keep_own", 2, "hang")), "one step off")
    assert "rollout-1" in {event["worker"] for event in found.observer.of("fault")}


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
