"""Tests of receivers that join, leave and pass versions on; a new one gets every version that live work needs."""

import asyncio
import random
from typing import Any

import pytest

from checkpoint_engine import EVALUATION, VersionGone
from tests.support.live import live_digest
from tests.support.virtual import run_virtual
from tests.unit.checkpoint_engine.engine_parts import Gone, flipped
from tests.unit.checkpoint_engine.engine_virtual import Rig, failing, hang


def test_a_joiner_gets_every_version_that_live_work_needs() -> None:
    async def main() -> None:
        rig = Rig(capacity=3)
        await rig.join("a")
        for version in range(5):
            await rig.delivery.publish(version)
            await rig.delivery.drain()
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

    run_virtual(main())


def test_a_joiner_that_dies_while_joining_is_reported_and_replaced() -> None:
    async def main() -> None:
        rig = Rig()
        await rig.delivery.publish(0)
        await rig.delivery.drain()
        assert not await rig.delivery.join(rig.end("x", failing(9, Gone)), [0])
        await rig.delivery.drain()
        assert rig.replaced == [("x", "Gone")] and rig.delivery.receivers == ()

    run_virtual(main())


def test_evaluation_versions_have_their_own_slot_and_reach_joiners() -> None:
    async def main() -> None:
        rig = Rig(capacity=1)
        await rig.join("a")
        await rig.delivery.publish(0)
        await rig.delivery.drain()
        await rig.delivery.place(0)
        for version in (1, 2, 3):
            await rig.delivery.publish(version)
            await rig.delivery.drain()
        await rig.delivery.join(rig.end("late"), [3])
        for name in ("a", "late"):
            assert rig.ends[name].receiver.held() == (("policy", 0, EVALUATION), ("policy", 3, "ring"))
        assert rig.sender.publisher.retained() == (0, 3)
        await rig.delivery.place(3)
        await rig.delivery.drain()
        assert rig.sender.publisher.retained() == (3,)
        with pytest.raises(VersionGone, match="version 0 can't be evaluated"):
            await rig.delivery.place(0)

    run_virtual(main())


def test_leaving_in_the_middle_of_a_transfer_hangs_nothing() -> None:
    async def main() -> None:
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

    run_virtual(main())


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(16))
def test_any_schedule_of_faults_and_churn_ends_with_everyone_served(seed: int) -> None:
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

    async def main() -> None:
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

    run_virtual(main())
