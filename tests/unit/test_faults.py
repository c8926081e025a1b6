"""Tests of rollout workers and trainers that die, hang or hold wrong weights: the same weights, or a named error."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from async_flowrl.config.schema import Config
from async_flowrl.controller import dispatch, scoring
from async_flowrl.controller.context import Context
from async_flowrl.controller.dispatch import TicketLost
from async_flowrl.controller.endpoints import SenderFailed, SenderLate
from checkpoint_engine import WeightsMismatch
from separation.group import WorkerDied, WorkerFailed
from separation.supervise import DeadlineExceeded
from tests.support.run_checks import STEPS, check_bound
from tests.support.toy import calm_run, toy_config, virtual
from tests.support.toy_pool import Fault, ListObserver, Timing, ToyPool, no_fault, once
from tests.support.toy_rollout import ToyRollout
from tests.unit.faulty_runs import calm, check_recovered, disturbed


@pytest.mark.parametrize(
    ("what", "k"), [("kill", 0), ("kill", 1), ("unusable", 1), ("hang", 1), ("hang", 3), ("slow", 3)]
)
def test_a_worker_lost_while_it_makes_images_is_replaced(what: str, k: int) -> None:
    found = disturbed(once("rollout-0", "generate", 3, what), k)
    check_recovered(found, k)
    lost = next(e for e in found.tickets("PENDING") if e["attempt"] == 1)
    again = [e["worker"] for e in found.tickets("RUNNING") if e["ordinal"] == lost["ordinal"]]
    assert again[0] == "rollout-0" and len(again) == 2
    assert found.table.retried in (1, 2), "the ticket under way, and one given ahead"
    assert found.groups["rollout"].workers[0].name == "rollout-0.1"
    (fault,) = found.observer.of("fault")
    assert fault["kind"] == ("WorkerDied" if what in ("kill", "unusable") else "DeadlineExceeded")
    assert any(e["worker"] == "rollout-0.1" for e in found.tickets("RUNNING")), "the replacement serves"
    (replaced,) = found.observer.of("replaced")
    assert replaced["fenced"], "a worker declared dead is killed before its slot is reused"


@pytest.mark.parametrize(("worker", "method"), [("rollout-0", "generate"), ("reward-0", "score")])
def test_the_terminal_names_a_worker_that_is_lost(worker: str, method: str, caplog: pytest.LogCaptureFixture) -> None:
    disturbed(once(worker, method, 3, "kill"))
    (warning,) = (record for record in caplog.records if record.name in (dispatch.__name__, scoring.__name__))
    assert warning.levelname == "WARNING" and warning.args is not None and worker in warning.args


@pytest.mark.parametrize(
    ("number", "what"), [(1, "corrupt"), (1, "truncate"), (2, "truncate"), (3, "corrupt"), (5, "truncate")]
)
def test_damaged_weights_are_sent_again(number: int, what: str) -> None:
    found = disturbed(once("rollout-1", "receive", number, what))
    check_recovered(found)
    assert found.groups["rollout"].replaced == 0
    assert (found.sync["corrupt"], found.sync["retries"]) == ((0, 0) if number == 1 else (1, 1))


@pytest.mark.parametrize(
    ("method", "number", "what", "message", "replaced"),
    [
        ("receive", 1, "kill", "rollout-1", 1),
        ("receive", 1, "hang", "proof to rollout-1", 1),
        ("receive", 2, "hang", "rollout-1 did not take version 0", 0),  # The run ends before.
        ("prove", 1, "kill", "rollout-1", 1),
        ("prove", 1, "unusable", "rollout-1", 1),
    ],
)
def test_a_worker_that_its_delivery_loses_is_one_fault(
    method: str, number: int, what: str, message: str, replaced: int
) -> None:
    found = disturbed(once("rollout-1", method, number, what), trainer__ema_decay=0.9)
    (fault,) = found.observer.of("fault")
    assert (fault["worker"], found.groups["rollout"].replaced) == ("rollout-1", replaced)
    assert message in fault["message"]


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
            poisoned = method == "generate" and args[0][0].ordinal == 6
            return 1e3 if poisoned else super().duration(worker, method, call, args)

    changes = {} if attempts == 6 else {"limits__ticket_attempts": attempts}
    config = toy_config(3, steps=40, rollout__num_workers=4, **changes)
    with pytest.raises(TicketLost, match=rf"train ticket 6 .* was lost {attempts} times"):
        virtual(config, Poison())


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


@pytest.mark.parametrize("what", ["kill", "hang", "raise"])
@pytest.mark.parametrize("method", ["train", "add_up", "stage", "seal", "payload", "proof"])
def test_a_trainer_that_fails_ends_the_run_by_name(method: str, what: str) -> None:
    """(Recovery is tested elsewhere: the next attempt begins at the last checkpoint.)"""
    number = 1 if method in ("proof", "train") else 3
    with pytest.raises((WorkerDied, WorkerFailed, TimeoutError, SenderLate)) as error:
        disturbed(once("trainer-0", method, number, what), hand_over="stream", deadlines__update=15.0)
    named = {
        "kill": "trainer-0 died",
        "raise": f"{method.removesuffix('_last')} raised RuntimeError: injected",
        "hang": "deadline",
    }
    assert named[what] in str(error.value)


Pools = Mapping[str, ToyPool]


async def worker_dies(ctx: Context, pools: Pools) -> None:
    await asyncio.sleep(7.3)
    pools["rollout"].workers[0].kill()


async def worker_comes(ctx: Context, pools: Pools) -> None:
    await asyncio.sleep(7.3)
    pools["rollout"].growth.arrive()


def one_worker(*, elastic: bool) -> Config:
    bounds = {"rollout__min_workers": 1, "rollout__max_workers": 4} if elastic else {}
    return toy_config(0, steps=STEPS, **{"rollout__num_workers": 1, **bounds})


def blamed(
    config: Config,
    disturb: Any,
    fault: Fault = no_fault,
    error: type[Exception] = WorkerDied,
    match: str = "trainer-0 died",
) -> list[str]:
    """Runs a job that its only trainer rank must end with this error; returns the rollout workers with a fault."""
    observer = ListObserver()
    with pytest.raises(error, match=match):
        virtual(config, Timing(generate=20.0), fault, disturb=disturb, observer=observer)
    return [event["worker"] for event in observer.of("fault")]


def test_a_rank_that_dies_before_a_new_worker_gets_its_versions_is_blamed() -> None:
    """The rank is idle, because images take long: nothing else notices its death."""

    async def both_die(ctx: Context, pools: Pools) -> None:
        await worker_dies(ctx, pools)
        while not any(worker.name == "rollout-0.1" for worker in pools["rollout"].workers):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        pools["trainer"].workers[0].kill()

    assert blamed(one_worker(elastic=False), both_die) == ["rollout-0"], "its replacement is not to blame"


@pytest.mark.parametrize(
    ("comes", "elastic"), [(False, False), (False, True), (True, True)], ids=["fixed", "replacement", "newcomer"]
)
@pytest.mark.parametrize(
    ("what", "error", "match"),
    [
        ("raise", SenderFailed, r"trainer-0\.sender\.policy\.payload raised RuntimeError: injected"),
        ("hang", SenderLate, r"trainer-0 has not answered sender\.policy\.payload within the deadline of 30 s"),
    ],
)
def test_a_rank_that_cannot_send_a_version_to_a_new_worker_is_blamed(
    what: str, error: type[Exception], match: str, *, comes: bool, elastic: bool
) -> None:
    """Its third payload: the first two are the proof weights and version 0, which the worker that is there has got."""
    fault, disturb = once("trainer-0", "payload", 3, what), worker_comes if comes else worker_dies
    assert blamed(one_worker(elastic=elastic), disturb, fault, error, match) == ([] if comes else ["rollout-0"])


@pytest.mark.parametrize(
    ("what", "state", "k", "hand_over"),
    [
        ("lose-images", "SCORING", 0, "batch"),
        ("lose-images", "SCORING", 1, "stream"),
        ("lose-images", "SCORING", 3, "batch"),
        ("lose-trajectory", "HANDED", 0, "stream"),
        ("lose-trajectory", "HANDED", 1, "batch"),
        ("lose-trajectory", "HANDED", 3, "stream"),
    ],
)
def test_a_lost_payload_is_made_again(what: str, state: str, k: int, hand_over: str) -> None:
    found = disturbed(once("rollout-0", "generate", 3, what), k, hand_over=hand_over)
    check_recovered(found, k)
    ordinal = next(e["ordinal"] for e in found.tickets("PENDING") if e["attempt"] == 1)
    history = [e["state"] for e in found.observer.of("ticket", kind="train", ordinal=ordinal)]
    assert history[history.index(state, 1) + 1] == "PENDING"
    assert history.count("RUNNING") == 2
    assert found.observer.of("fault")[0]["kind"] == "RefLost"


@pytest.mark.parametrize(("k", "ranks"), [(0, 1), (1, 2), (3, 1), (3, 2)])
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


@pytest.mark.parametrize(("seed", "number"), [(2, 6), (3, 4), (5, 3), (8, 3)])
def test_a_trajectory_is_made_again_while_another_trainer_rank_comes_to_its_group(seed: int, number: int) -> None:
    """So few groups that ranks share them, and delays that let a rank come to a group while it has no payloads."""
    changes = {"ticket_size": 1, "trainer__micro_batch_size": 2, "trainer__num_workers": 2, "prompts_per_step": 2}
    config = toy_config(1, hand_over="stream", steps=3, **changes)
    timing = Timing(seed=seed, spread=0.9, update=2.0, slow={"trainer-1": 2.0})
    found = virtual(config, timing, once("rollout-0", "generate", number, "lose-trajectory"))
    assert found.observer.of("fault", kind="RefLost")
    assert found.digest == calm_run(config).digest
