"""Tests of receivers that pass versions on to others: the width of the tree, lags, losses and deaths."""

import asyncio
from typing import Any

import pytest

from checkpoint_engine.base import depth, parents
from separation.group import RefLost
from tests.support.virtual import run_virtual
from tests.unit.checkpoint_engine.engine_parts import Gone
from tests.unit.checkpoint_engine.engine_virtual import Rig, failing


@pytest.mark.parametrize("nodes", [1, 2, 4, 8, 100])
@pytest.mark.parametrize("each", [1, 4])
def test_no_node_sends_a_payload_to_more_than_two_others(nodes: int, each: int) -> None:
    """Whatever their number: each node that is sent to costs a copy on the sending node's link."""
    where: dict[str | None, str] = {f"w{i}": f"n{i // each}" for i in range(nodes * each)}
    plan = parents({name: node for name, node in where.items() if name is not None})
    sent_to: dict[str, set[str]] = {}
    for name, parent in plan.items():
        source = where.get(parent, "sender")
        if source != where[name]:
            sent_to.setdefault(source, set()).add(where[name])
    assert len(sent_to["sender"]) == min(2, nodes) and max(map(len, sent_to.values())) <= 2
    assert set().union(*sent_to.values()) == set(where.values()), "everybody is reached"
    assert max(depth(plan, name) for name in plan) <= nodes.bit_length()


@pytest.mark.parametrize("capacity", [1, 2])
def test_a_receiver_that_lags_behind_the_one_above_it_gets_old_versions_from_the_sender(capacity: int) -> None:
    """The one above it has gone on to newer versions by then and retains the old ones no more."""

    async def main() -> None:
        async def stuck(attempt: int, header: Any, payload: Any) -> Any:
            await asyncio.sleep(20.0 * (header.version == 0))
            return payload

        rig = Rig(capacity=capacity)
        for i in range(3):
            await rig.join(f"w{i}", stuck if i == 2 else None, f"n{i}")
        for version in range(6):
            await rig.delivery.publish(version)
            await asyncio.sleep(2.0)
        await rig.delivery.drain()
        newest = list(range(6))[-capacity:]
        assert rig.held("w2") == rig.held("w0") == newest and rig.replaced == []
        assert rig.delivery.stats.fallbacks == 5 - capacity

    run_virtual(main())


def test_a_payload_that_is_lost_with_the_node_that_passed_it_on_comes_from_the_sender() -> None:
    async def main() -> None:
        rig = Rig()
        for i in range(3):
            await rig.join(f"w{i}", failing(1, lambda: RefLost("a value is gone")) if i == 2 else None, f"n{i}")
        await rig.delivery.publish(0)
        await rig.delivery.drain()
        assert rig.held("w2") == [0] and rig.ends["w0"].relayed == [0]
        assert rig.replaced == [] and rig.delivery.stats.retries == 1

    run_virtual(main())


def test_fan_out_serves_neighbours_from_leaders_and_survives_a_dead_one() -> None:
    async def main() -> None:
        rig = Rig(max_fan_out=4, replacing=False)
        for i in range(12):
            await rig.join(f"w{i}", failing(1, Gone) if i == 1 else None, f"n{i % 3}")
        await rig.delivery.publish(0)
        await rig.delivery.drain()
        assert rig.replaced == [("w1", "Gone")]
        assert all(rig.held(f"w{i}") == [0] for i in range(12) if i != 1)
        relays = {name: len(end.relayed) for name, end in rig.ends.items() if end.relayed}
        assert relays == {"w0": 1, "w2": 1}
        assert len(rig.sender.served) == 1

    run_virtual(main())
