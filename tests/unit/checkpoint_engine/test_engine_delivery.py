"""Tests of deliveries: acknowledged, sent again, the receiver replaced, or the run stopped."""

import asyncio
from typing import Any

import pytest

from checkpoint_engine import (
    Ack,
    TransferCorrupted,
    TransferFailed,
    VersionGone,
    WeightsMismatch,
)
from checkpoint_engine.errors import Verdict, verdict
from tests.support.virtual import run_virtual
from tests.unit.checkpoint_engine.engine_parts import Gone
from tests.unit.checkpoint_engine.engine_virtual import Rig, failing, hang


def test_publish_returns_when_staged_and_drain_when_acknowledged() -> None:
    async def main() -> None:
        rig = Rig()
        for name in ("a", "b"):
            await rig.join(name)
        await rig.delivery.publish(0)
        assert asyncio.get_running_loop().time() == 0.0 and rig.acks == []
        await rig.delivery.drain()
        assert sorted(rig.acks) == [("a", 0, "ring"), ("b", 0, "ring")]
        assert rig.delivery.stats.publishes == 1
        assert rig.delivery.stats.seconds == pytest.approx(0.1)
        await rig.delivery.close()

    run_virtual(main())


@pytest.mark.parametrize(
    ("fault", "error", "attempts"),
    [
        (failing(99), "TransferCorrupted", 4),
        (failing(99, Gone), "Gone", 1),
        (hang, "TimeoutError", 4),
        (failing(99, lambda: TransferFailed("no")), "TransferFailed", 4),
    ],
)
def test_a_hopeless_receiver_is_replaced_and_the_new_one_gets_what_is_retained(fault, error, attempts) -> None:
    async def main() -> None:
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

    run_virtual(main())


def test_a_slow_receiver_stalls_nobody_else() -> None:
    async def slow(attempt: int, header: Any, payload: Any) -> Any:
        await asyncio.sleep(20.0)
        return payload

    async def main() -> None:
        rig = Rig()
        await rig.join("slow", slow)
        await rig.join("fast")
        for version in range(3):
            await rig.delivery.publish(version)
            await asyncio.sleep(0.2)
        assert rig.held("fast") == [1, 2] and rig.held("slow") == []
        await rig.delivery.drain()
        assert rig.held("slow") == [1, 2]
        assert [v for name, v, _ in rig.acks if name == "slow"] == [0, 1, 2]

    run_virtual(main())


async def wrong_alpha(attempt: int, header: Any, payload: Any) -> Any:
    raise WeightsMismatch("LoRA alpha 16.0, expected 8.0")


async def bug(attempt: int, header: Any, payload: Any) -> Any:
    raise ZeroDivisionError("a bug")


@pytest.mark.parametrize(("fault", "error"), [(wrong_alpha, WeightsMismatch), (bug, ZeroDivisionError)])
def test_a_mismatch_or_an_unknown_error_stops_the_run_everywhere(fault, error) -> None:
    async def main() -> None:
        rig = Rig()
        await rig.join("a", fault)
        watcher = asyncio.create_task(rig.delivery.failed())
        await rig.delivery.publish(0)
        for surface in (watcher, rig.delivery.drain(), rig.delivery.publish(1), rig.delivery.join(rig.end("b"))):
            with pytest.raises(error):
                await surface
        assert rig.replaced == []
        await rig.delivery.close()

    run_virtual(main())


def test_an_acknowledgement_of_something_else_stops_the_run() -> None:
    async def main() -> None:
        rig = Rig()
        end = rig.end("liar")

        async def receive(header: Any, payload: Any, slot: str) -> Ack:
            return Ack(header.stream, header.version, "0" * 64, slot)

        end.receive = receive  # type: ignore[method-assign]
        await rig.delivery.join(end)
        await rig.delivery.publish(0)
        with pytest.raises(WeightsMismatch, match="liar acknowledged"):
            await rig.delivery.drain()

    run_virtual(main())


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
