"""Tests of workers that die, hang, lose values or return nonsense: the same weights, or a named error."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from async_flowrl.controller.admission import StartError
from async_flowrl.controller.context import Context
from async_flowrl.controller.dispatch import TicketLost
from async_flowrl.controller.sender_errors import SenderLate
from async_flowrl.tickets.table import State
from async_flowrl.types import Prompt, Scores
from checkpoint_engine import WeightsMismatch
from separation.group import WorkerDied, WorkerFailed
from separation.supervise import DeadlineExceeded
from tests.support.run_checks import check_bound, check_evaluation, check_once, check_watermarks
from tests.support.toy import ToyRun, calm_run, toy_config, virtual
from tests.support.toy_pool import Fault, ListObserver, Timing, ToyPool, once
from tests.support.toy_reward import ToyReward, toy_scores
from tests.support.toy_rollout import ToyRollout

Kill = Callable[[Context, Mapping[str, ToyPool]], Any]
STEPS = 6


def calm(k: int = 1, **changes: Any) -> ToyRun:
    return calm_run(toy_config(k, steps=STEPS, **changes))


def disturbed(fault: Fault, k: int = 1, *, timing: Timing | None = None, **changes: Any) -> ToyRun:
    return virtual(toy_config(k, steps=STEPS, **changes), timing, fault)


def always(worker: str, method: str, what: str) -> Fault:
    return lambda name, called, number: what if name.startswith(worker) and called == method else None


def check_recovered(found: ToyRun, k: int = 1) -> None:
    """Something was injected, and nothing came of it but time."""
    assert found.observer.of("injected"), "the disturbance did not happen"
    check_bound(found, k)
    check_once(found)
    check_watermarks(found)
    assert found.digest == calm(k).digest


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("what", ["kill", "hang", "slow"])
def test_a_worker_lost_while_it_makes_images_is_replaced(what: str, k: int) -> None:
    found = disturbed(once("rollout-0", "generate", 3, what), k)
    check_recovered(found, k)
    lost = next(e for e in found.tickets("PENDING") if e["attempt"] == 1)
    again = [e["worker"] for e in found.tickets("RUNNING") if e["ordinal"] == lost["ordinal"]]
    assert again[0] == "rollout-0" and len(again) == 2
    assert found.table.retried in (1, 2), "the ticket under way, and one given ahead"
    assert found.groups["rollout"].workers[0].name == "rollout-0.1"
    (fault,) = found.observer.of("fault")
    assert fault["kind"] == ("WorkerDied" if what == "kill" else "DeadlineExceeded")
    assert any(e["worker"] == "rollout-0.1" for e in found.tickets("RUNNING")), "the replacement serves"
    (replaced,) = found.observer.of("replaced")
    assert replaced["fenced"], "a worker declared dead is killed before its slot is reused"


@pytest.mark.parametrize("what", ["kill", "hang"])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_worker_lost_while_weights_arrive_is_replaced(number: int, what: str) -> None:
    """The first delivery is the canary, the second version 0."""
    fault = once("rollout-1", "receive", number, what)
    found = disturbed(fault, timing=Timing(transfer=0.5), deadlines__publish=1.0)
    check_recovered(found)
    assert found.groups["rollout"].replaced == 1


@pytest.mark.parametrize("what", ["corrupt", "truncate"])
@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_damaged_weights_are_sent_again(number: int, what: str) -> None:
    found = disturbed(once("rollout-1", "receive", number, what))
    check_recovered(found)
    assert found.groups["rollout"].replaced == 0
    assert (found.sync["corrupt"], found.sync["retries"]) == ((0, 0) if number == 1 else (1, 1))


def test_a_worker_that_always_receives_damage_is_replaced_and_then_named() -> None:
    one = disturbed(lambda w, m, n: "corrupt" if (w, m) == ("rollout-1", "receive") and n > 2 else None)
    check_recovered(one)
    assert one.groups["rollout"].replaced == 1
    with pytest.raises(WorkerDied, match=r"rollout-1\.\d died: given up, the canary does not arrive"):
        disturbed(always("rollout-1", "receive", "corrupt"))


def test_a_worker_that_dies_while_it_waits_is_replaced_at_once() -> None:
    when: dict[str, float] = {}

    async def kill_waiting(ctx: Context, groups: Mapping[str, ToyPool]) -> None:
        worker = groups["rollout"].workers[1]
        await ctx.ready.until(lambda: ctx.table.step == 2 and all(ctx.table.ready(2, group) for group in range(4)))
        await asyncio.sleep(5.0)
        when["killed"] = ctx.observer.now()
        worker.kill()

    found = virtual(toy_config(0, steps=STEPS), Timing(update=30.0), disturb=kill_waiting)
    assert found.digest == calm(0).digest
    fault = found.observer.of("fault", worker="rollout-1")[0]
    assert fault["time"] == pytest.approx(when["killed"])
    assert found.table.retried == 0
    assert any(e["worker"] == "rollout-1.1" for e in found.tickets("RUNNING"))


@pytest.mark.parametrize("k", [0, 1, 3])
def test_all_rollout_workers_die_at_once(k: int) -> None:
    async def kill_all(ctx: Context, groups: Mapping[str, ToyPool]) -> None:
        await asyncio.sleep(7.3)
        for worker in groups["rollout"].workers:
            worker.kill()

    found = virtual(toy_config(k, steps=STEPS, rollout__num_workers=3), Timing(transfer=0.4), disturb=kill_all)
    assert found.digest == calm(k).digest
    assert found.groups["rollout"].replaced == 3
    check_bound(found, k)
    check_once(found)


@pytest.mark.parametrize("method", ["load", "receive", "prove"])
@pytest.mark.parametrize("what", ["kill", "hang"])
def test_a_replacement_that_is_lost_while_it_joins_is_replaced_itself(method: str, what: str) -> None:
    def fault(worker: str, called: str, number: int) -> str | None:
        if (worker, called, number) == ("rollout-0", "generate", 2):
            return "kill"
        return what if (worker, called, number) == ("rollout-0.1", method, 1) else None

    found = disturbed(fault, deadlines__publish=1.0, deadlines__load=1.0)
    check_recovered(found)
    assert found.groups["rollout"].workers[0].name == "rollout-0.2"


@pytest.mark.parametrize(
    ("method", "what", "losses"),
    [("load", "kill", 4), ("prove", "hang", 4), ("receive", "kill", 4), ("load", "kill", 1)],
)
def test_a_slot_that_loses_every_worker_ends_the_run_by_name(method: str, what: str, losses: int) -> None:
    def fault(worker: str, called: str, number: int) -> str | None:
        if (worker, called, number) == ("rollout-0", "generate", 2):
            return "kill"
        return what if worker.startswith("rollout-0.") and called == method else None

    changes = {} if losses == 4 else {"limits__workers_lost_in_a_row": losses}
    with pytest.raises((WorkerDied, DeadlineExceeded), match=rf"rollout-0\.{losses}\b") as error:
        disturbed(fault, rollout__num_workers=1, **changes)
    said = f"slot 0 of the rollout pool lost {losses + 1} workers without a finished ticket"
    assert said in error.value.__notes__


@pytest.mark.parametrize("attempts", [6, 1])
def test_a_ticket_that_kills_every_worker_ends_the_run_by_name(attempts: int) -> None:
    """The workers do well between two attempts at it."""

    class Poison(Timing):
        def duration(self, worker: str, method: str, call: int, args: tuple[Any, ...] = ()) -> float:
            poisoned = method == "generate" and args[0].ordinal == 6
            return 1e3 if poisoned else super().duration(worker, method, call, args)

    changes = {} if attempts == 6 else {"limits__ticket_attempts": attempts}
    config = toy_config(3, steps=40, rollout__num_workers=4, **changes)
    with pytest.raises(TicketLost, match=rf"train ticket 6 .* was lost {attempts} times"):
        virtual(config, Poison())


def test_a_replacement_that_cannot_load_its_model_ends_the_run_by_name() -> None:
    def fault(worker: str, called: str, number: int) -> str | None:
        faults = {("rollout-0", "generate", 2): "kill", ("rollout-0.1", "load", 1): "raise"}
        return faults.get((worker, called, number))

    with pytest.raises(WorkerFailed, match=r"rollout-0\.1\.load raised RuntimeError: injected"):
        disturbed(fault)


def test_a_replacement_with_another_base_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    load = ToyRollout.load
    monkeypatch.setattr(ToyRollout, "load", lambda self: load(self) | {"base_digest": f"of {self.name}"})
    with pytest.raises(StartError, match=r"rollout-0\.1 holds other base weights"):
        disturbed(once("rollout-0", "generate", 2, "kill"))


@pytest.mark.parametrize("name", ["rollout-1", "rollout-0.1"])
def test_a_worker_that_computes_with_other_modules_never_serves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start as after a replacement: its live layers are not those that the weights are delivered into."""
    prove = ToyRollout.prove

    def elsewhere(self: ToyRollout, version: int) -> Any:
        found = prove(self, version)
        return {module: 2.0 * value for module, value in found.items()} if self.name == name else found

    monkeypatch.setattr(ToyRollout, "prove", elsewhere)
    observer = ListObserver()
    with pytest.raises(WeightsMismatch, match=f"layer at {name} "):
        virtual(toy_config(1), fault=once("rollout-0", "generate", 2, "kill"), observer=observer)
    assert not observer.of("ticket", state="RUNNING", worker=name)


@pytest.mark.parametrize("what", ["kill", "hang", "raise", "nan", "count"])
def test_a_reward_that_fails_once_is_asked_again(what: str) -> None:
    found = disturbed(once("reward-0", "score", 3, what))
    check_recovered(found)
    (fault,) = found.observer.of("fault")
    kinds = {"kill": "WorkerDied", "hang": "DeadlineExceeded"}
    assert fault["kind"] == kinds.get(what, "WorkerFailed")
    assert found.groups["reward"].replaced == (what in kinds)
    if what in ("nan", "count"):
        assert "RewardError" in fault["message"] and "must return 4 finite numbers" in fault["message"]


@pytest.mark.parametrize(
    ("what", "error", "text"),
    [
        ("raise", WorkerFailed, "raised RuntimeError: injected"),
        ("nan", WorkerFailed, "raised RewardError: reward 'color' on prompt 'prompt 0' must return 4 finite numbers"),
        ("count", WorkerFailed, r"raised RewardError: .*got shape \[3\]"),
        ("hang", DeadlineExceeded, "score: train ticket 0 .* was not done within its deadline of 30 s"),
        ("kill", WorkerDied, r"reward-0\.\d+ died: killed during score"),
    ],
)
def test_a_reward_that_always_fails_ends_the_run_by_name(what: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        disturbed(always("reward-0", "score", what), data__shuffle=False)


def test_retries_of_a_reward_back_off() -> None:
    observer = ListObserver()
    config = toy_config(1, steps=STEPS, reward__backoff=0.5, reward__retries=3)
    with pytest.raises(WorkerFailed):
        virtual(config, fault=always("reward-0", "score", "raise"), observer=observer)
    first: dict[str, list[float]] = {}
    for event in observer.of("injected"):
        first.setdefault(event["worker"], []).append(event["time"])
    times = [e["time"] for e in observer.of("fault")]
    assert len(times) >= 4
    own = [times[0], times[0] + 0.6, times[0] + 0.6 + 1.1, times[0] + 0.6 + 1.1 + 2.1]
    assert all(any(abs(t - o) < 0.11 for t in times) for o in own)


@pytest.mark.parametrize("hand_over", ["batch", "stream"])
@pytest.mark.parametrize("result", [[1.0, 2.0, 3.0, float("nan")], [1.0], None])
def test_groups_whose_reward_cannot_be_had_are_skipped_if_asked(
    result: object, hand_over: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prompt of five never gets a score: its groups leave a gap and the run goes on."""
    score = ToyReward.score

    def unlucky(self: ToyReward, prompt: Prompt, *images: Any) -> Scores:
        return score(self, prompt, *images) if prompt.index != 2 else toy_scores("color", prompt, result, 4)

    monkeypatch.setattr(ToyReward, "score", unlucky)
    found = virtual(toy_config(1, hand_over=hand_over, steps=STEPS, reward__on_error="skip", reward__retries=1))
    counts = found.table.counts()
    skipped = found.observer.of("skipped")
    assert len(skipped) > 0
    assert (counts[State.SKIPPED], counts[State.TRAINED]) == (len(skipped), found.table.issued - len(skipped))
    assert len(found.trained) == counts[State.TRAINED]
    assert sum(line.get("tickets_skipped", 0) for line in found.lines) == len(skipped)
    assert found.staleness() == [min(step, 1) for step in range(STEPS)]


@pytest.mark.parametrize("hand_over", ["batch", "stream"])
@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize(("what", "state"), [("lose-images", "SCORING"), ("lose-trajectory", "HANDED")])
def test_a_lost_payload_is_made_again(what: str, state: str, k: int, hand_over: str) -> None:
    found = disturbed(once("rollout-0", "generate", 3, what), k, hand_over=hand_over)
    check_recovered(found, k)
    ordinal = next(e["ordinal"] for e in found.tickets("PENDING") if e["attempt"] == 1)
    history = [e["state"] for e in found.observer.of("ticket", kind="train", ordinal=ordinal)]
    assert history[history.index(state, 1) + 1] == "PENDING"
    assert history.count("RUNNING") == 2
    assert found.observer.of("fault")[0]["kind"] == "RefLost"


def test_a_payload_lost_while_it_waits_for_the_trainer_is_made_again() -> None:
    """One ticket of two in its group; the other comes again with it."""
    hit: list[int] = []

    async def lose(ctx: Context, groups: Mapping[str, ToyPool]) -> None:
        while not hit:
            await asyncio.sleep(0.05)
            for ticket in ctx.table.live():
                if ticket.state is State.READY and ticket.step == 3:
                    ticket.payload[1].lost = True
                    hit.append(ticket.ordinal)
                    return

    found = virtual(toy_config(1, steps=STEPS, ticket_size=2), disturb=lose)
    assert hit and found.digest == calm().digest
    assert found.table.retried == 2
    check_once(found)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_a_trajectory_lost_before_the_proximal_predictions_is_made_again(k: int, ranks: int) -> None:
    """With several updates per batch the trainer looks at the later groups first, before its first update."""
    changes = {"trainer__updates_per_batch": 2, "trainer__num_workers": ranks, "rollout__num_workers": 1}
    found = disturbed(once("rollout-0", "generate", 7, "lose-trajectory"), k, **changes)
    (fault,) = found.observer.of("fault", kind="RefLost")
    history = [e["state"] for e in found.observer.of("ticket", kind="train", ordinal=6)]
    assert history.count("RUNNING") == 2 and history[history.index("HANDED") + 1] == "PENDING"
    others = [e["state"] for e in found.observer.of("ticket", kind="train", step=1) if e["time"] <= fault["time"]]
    assert others.count("HANDED") == 4 and "TRAINED" not in others
    trainers = found.groups["trainer"].workers
    trained = sorted(each for worker in trainers for each in worker.target.trained)
    assert [group for step, group, _ in trained if step == 1] == [0, 1, 2, 3] and len(trained) == 4 * STEPS
    assert sum(worker.calls["proximal"] for worker in trainers) == 2 * STEPS + 1
    check_bound(found, k)
    assert found.digest == calm(k, trainer__updates_per_batch=2).digest != calm(k).digest


@pytest.mark.parametrize("hand_over", ["batch", "stream"])
def test_a_trajectory_that_one_of_several_trainer_ranks_lacks_is_made_again(hand_over: str) -> None:
    found = disturbed(once("rollout-0", "generate", 3, "lose-trajectory"), trainer__num_workers=2, hand_over=hand_over)
    assert len(found.observer.of("fault", kind="RefLost")) == 1
    assert found.digest == calm().digest
    trained = sorted(each for worker in found.groups["trainer"].workers for each in worker.target.trained)
    assert [each[:2] for each in trained] == [(step, group) for step in range(STEPS) for group in range(4)]


@pytest.mark.parametrize(("seed", "number"), [(2, 6), (3, 4), (5, 3), (8, 3)])
def test_a_trajectory_is_made_again_while_another_trainer_rank_comes_to_its_group(seed: int, number: int) -> None:
    """So few groups that ranks share them, and delays that let a rank come to a group while it has no payloads."""
    changes = {"ticket_size": 1, "trainer__micro_batch_size": 2, "trainer__num_workers": 2, "prompts_per_step": 2}
    config = toy_config(1, hand_over="stream", steps=3, **changes)
    timing = Timing(seed=seed, spread=0.9, update=2.0, slow={"trainer-1": 2.0})
    found = virtual(config, timing, once("rollout-0", "generate", number, "lose-trajectory"))
    assert found.observer.of("fault", kind="RefLost")
    assert found.digest == calm_run(config).digest


def test_lost_images_of_an_evaluation_are_made_again() -> None:
    def lose(worker: str, method: str, number: int) -> str | None:
        return "lose-images" if method.startswith("generate") and number % 4 == 0 else None

    found = disturbed(lose, evaluate__every=2, evaluate__before_training=True)
    assert any(e["method"] == "generate/evaluation" for e in found.observer.of("injected"))
    check_evaluation(found, [0, 2, 4, 6])
    check_recovered(found)
    pictures = [[image.tolist() for image in result.images] for result in found.evaluated]
    plain = calm(evaluate__every=2, evaluate__before_training=True)
    assert pictures == [[image.tolist() for image in result.images] for result in plain.evaluated]


@pytest.mark.parametrize("what", ["kill", "hang", "raise"])
@pytest.mark.parametrize("method", ["train", "train_last", "stage", "seal", "payload", "canary"])
def test_a_trainer_that_fails_ends_the_run_by_name(method: str, what: str) -> None:
    """(Recovery is tested elsewhere: the next attempt begins at the last checkpoint.)"""
    number = 1 if method in ("canary", "train") else 3
    with pytest.raises((WorkerDied, WorkerFailed, TimeoutError, SenderLate)) as error:
        disturbed(once("trainer-0", method, number, what), hand_over="stream", deadlines__update=15.0)
    named = {
        "kill": "trainer-0 died",
        "raise": f"{method.removesuffix('_last')} raised RuntimeError: injected",
        "hang": "deadline",
    }
    assert named[what] in str(error.value)


@pytest.mark.parametrize("method", ["hold", "release"])
def test_a_trainer_that_hangs_for_an_evaluation_ends_the_run_by_name(method: str) -> None:
    with pytest.raises(TimeoutError, match=f"{method} was not done within its deadline of 30 s"):
        disturbed(once("trainer-0", method, 1, "hang"), evaluate__every=2)
