"""Tests of receivers that join, leave and pass versions on; a new one gets every version that live work needs."""

import asyncio
import random
from typing import Any

import pytest

from checkpoint_engine import EVALUATION, Ack, TransferCorrupted, TransferFailed, VersionGone, WeightsMismatch
from checkpoint_engine.errors import Verdict, verdict
from tests.support.live import live_digest
from tests.unit.checkpoint_engine.engine_parts import Gone, flipped
from tests.unit.checkpoint_engine.engine_virtual import Rig, failing, hang


async def test_a_joiner_gets_every_version_that_live_work_needs() -> None:
    rig = Rig(capacity=3)
    await rig.join("a")
    await rig.publish(*range(5))
    await rig.delivery.publish(5)
    assert await rig.delivery.join(rig.end("late"), [3, 5])
    assert rig.held("late") == [3, 4]
    await rig.delivery.drain()
    assert rig.held("late") == [3, 4, 5]
    with pytest.raises(VersionGone, match=r"\[1\] are not retained, only \[3, 4, 5\]"):
        await rig.delivery.join(rig.end("later"), [1])
    assert rig.delivery.receivers == ("a", "late")
    with pytest.raises(ValueError, match="late has joined already"):
        await rig.delivery.join(rig.ends["late"])


async def test_a_joiner_that_dies_while_joining_is_reported_and_replaced() -> None:
    rig = Rig()
    await rig.publish(0)
    assert not await rig.delivery.join(rig.end("x", failing(9, Gone)), [0])
    await rig.delivery.drain()
    assert rig.replaced == [("x", "Gone")] and rig.delivery.receivers == ()


async def test_evaluation_versions_have_their_own_slot_and_reach_joiners() -> None:
    rig = Rig(capacity=1)
    await rig.join("a")
    await rig.publish(0)
    await rig.delivery.place(0)
    await rig.publish(1, 2, 3)
    await rig.delivery.join(rig.end("late"), [3])
    for name in ("a", "late"):
        assert rig.ends[name].receiver.held() == (("policy", 0, EVALUATION), ("policy", 3, "ring"))
    assert rig.sender.publisher.retained() == (0, 3)
    await rig.delivery.place(3)
    await rig.delivery.drain()
    assert rig.sender.publisher.retained() == (3,)
    with pytest.raises(VersionGone, match="version 0 can't be evaluated"):
        await rig.delivery.place(0)


async def test_leaving_in_the_middle_of_a_transfer_hangs_nothing() -> None:
    rig = Rig()
    await rig.join("a", hang)
    await rig.join("b")
    await rig.delivery.publish(0)
    await asyncio.sleep(1.0)
    await rig.delivery.leave("a")
    await rig.delivery.leave("a")
    await rig.delivery.drain()
    assert asyncio.get_running_loop().time() < 2.0 and rig.replaced == []
    assert rig.held("b") == [0]


@pytest.mark.extended
@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(16))
async def test_any_schedule_of_faults_and_churn_ends_with_everyone_served(seed: int) -> None:
    """Delays, corruptions, hangs and deaths at random instants; nobody keeps a wrong or torn version."""
    draw = random.Random(seed)

    async def fault(attempt: int, header: Any, payload: Any) -> Any:
        await asyncio.sleep(draw.expovariate(2.0))
        dice = draw.random()
        if dice < 0.1:
            return flipped(payload, draw.randrange(100))
        if dice < 0.15:
            return payload[:64]
        if dice < 0.18:
            await asyncio.sleep(1e4)
        if dice < 0.23:
            raise Gone("died")
        return payload

    rig = Rig(capacity=2, replacing=True, deadline=5.0)
    for i in range(4):
        await rig.join(f"w{i}", fault)
    for version in range(25):
        await rig.delivery.publish(version)
        await asyncio.sleep(draw.expovariate(1.0) + 0.2)
        if draw.random() < 0.1:
            await rig.delivery.leave(draw.choice(rig.delivery.receivers or ("none",)))
        if draw.random() < 0.1:
            await rig.delivery.join(rig.end(f"x{version}"), rig.sender.publisher.retained()[-1:])
    await rig.delivery.drain()
    for name in rig.delivery.receivers:
        receiver = rig.ends[name].receiver
        assert rig.held(name)[-1] == 24
        receiver.activate("policy", 24)
        assert live_digest(receiver) == rig.sender.publisher.payload(24)[0].digest
        assert all((t == 24.0).all() for t in receiver.tensors.values())
    await rig.delivery.close()


@pytest.mark.parametrize(
    ("fault", "error", "attempts"),
    [
        (failing(99), "TransferCorrupted", 4),
        (failing(99, Gone), "Gone", 1),
        (hang, "TimeoutError", 4),
        (failing(99, lambda: TransferFailed("no")), "TransferFailed", 4),
    ],
)
async def test_a_hopeless_receiver_is_replaced_and_the_new_one_gets_what_is_retained(fault, error, attempts) -> None:
    rig = Rig(replacing=True)
    await rig.join("good")
    await rig.join("bad", fault)
    for version in range(3):
        await rig.delivery.publish(version)
        await asyncio.sleep(1.0)
    await rig.delivery.drain()
    assert rig.replaced == [("bad", error)] and rig.ends["bad"].attempts == attempts
    assert rig.held("good") == rig.held("bad'") == [1, 2]
    assert rig.delivery.receivers == ("good", "bad'")


@pytest.mark.parametrize("error", [WeightsMismatch, ZeroDivisionError])
async def test_a_mismatch_or_an_unknown_error_stops_the_run_everywhere(error: type[Exception]) -> None:
    rig = Rig()
    await rig.join("a", failing(1, error))
    watcher = asyncio.create_task(rig.delivery.failed())
    await rig.delivery.publish(0)
    for surface in (watcher, rig.delivery.drain(), rig.delivery.publish(1), rig.delivery.join(rig.end("b"))):
        with pytest.raises(error):
            await surface
    assert rig.replaced == []
    await rig.delivery.close()


async def test_an_acknowledgement_of_something_else_stops_the_run() -> None:
    rig = Rig()
    end = rig.end("liar")

    async def receive(header: Any, payload: Any, slot: str) -> Ack:
        return Ack(header.stream, header.version, "0" * 64, slot)

    end.receive = receive  # type: ignore[method-assign]
    await rig.delivery.join(end)
    await rig.delivery.publish(0)
    with pytest.raises(WeightsMismatch, match="liar acknowledged"):
        await rig.delivery.drain()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TransferCorrupted("x"), Verdict.RESEND),
        (TimeoutError(), Verdict.RESEND),
        (Gone(), Verdict.REPLACE),
        (WeightsMismatch("x"), Verdict.STOP),
        (KeyError("x"), Verdict.STOP),
        (VersionGone("x"), Verdict.STOP),
    ],
)
def test_verdicts_hold_for_errors_of_other_processes_too(error: BaseException, expected: Verdict) -> None:
    class WorkerFailed(RuntimeError):
        kind = type(error).__name__

    assert verdict(error) is expected
    if not isinstance(error, Gone):
        assert verdict(WorkerFailed("remote")) is expected
