"""Tests of groups above the allowed size: one receiver per node is in the collective and serves its neighbours."""

import asyncio
from typing import Any

import pytest

from checkpoint_engine import RING, Delivery, Header, Publisher, Receiver, TransferFailed
from checkpoint_engine.base import parents
from checkpoint_engine.collective_delivery import CollectiveBroadcast
from examples.checkpoint_engine.piped_processes import ProcessSender, SharedPayload
from tests.support.live import live_digest
from tests.unit.checkpoint_engine.engine_local import Local
from tests.unit.checkpoint_engine.engine_parts import ALPHA, PATIENCE, RANK, blank, lora


class OnNode(Local):
    """A receiver of one of several nodes, which passes versions on to its neighbours."""

    def __init__(self, receiver: Receiver, name: str, node: str) -> None:
        super().__init__(receiver, name)
        self.node = node  # type: ignore[misc]
        self.passed_on: list[int] = []
        self.deaf = False

    async def relay(self, header: Header, slot: str = RING) -> Any:
        if self.deaf:
            raise TransferFailed("it does not pass on")
        self.passed_on.append(header.version)
        return SharedPayload(self.receiver.export(header.stream, header.version, slot=slot)[1])


@pytest.mark.parametrize("deaf", [False, True])
def test_a_group_above_the_limit_has_one_member_per_node_and_everyone_gets_the_version(deaf: bool) -> None:
    async def main() -> None:
        tensors = lora(width=128)
        publisher = Publisher(tensors, alpha=ALPHA, rank=RANK)
        sender = ProcessSender(publisher, "gloo")

        async def replace(name: str, error: BaseException) -> None:
            raise AssertionError(f"{name} was given up") from error

        broadcast = CollectiveBroadcast(sender, setup_seconds=PATIENCE, ready_seconds=PATIENCE, max_members=2)
        delivery = Delivery(sender, replace=replace, broadcast=broadcast)
        ends = [OnNode(Receiver(blank(tensors), alpha=ALPHA, rank=RANK), f"r{i}", f"n{i // 3}") for i in range(6)]
        ends[0].deaf = deaf
        try:
            for end in ends:
                await delivery.join(end)
            for version in range(2):
                await delivery.publish(version)
                await delivery.drain()
                digest = publisher.payload(version)[0].digest
                assert {end.receiver.activate("policy", version) for end in ends} == {digest}
                assert {live_digest(end.receiver) for end in ends} == {digest}
                for tensor in tensors.values():
                    tensor.mul_(1.5)
        finally:
            await delivery.close()
            sender.close()
            for end in ends:
                end.group.abort()
        assert [member.name for member in broadcast.members] == ["r0", "r3"]
        assert ends[3].passed_on == [0, 1] and ends[0].passed_on == ([] if deaf else [0, 1])
        assert delivery.stats.fallbacks == (4 if deaf else 0), "the sender serves whoever a leader fails"

    asyncio.run(asyncio.wait_for(main(), 240.0))


@pytest.mark.parametrize("neighbours", [3, 40])
def test_who_has_a_version_serves_its_node_and_the_sender_the_others(neighbours: int) -> None:
    nodes = {f"w{i}": "n0" for i in range(neighbours)} | {"far": "n9"}
    plan = parents(nodes, {"n0": "leader", "n1": "idle"})
    assert plan["far"] is None and plan["w0"] == "leader" and "idle" not in plan.values()
    assert set(plan) == set(nodes) and None not in {plan[f"w{i}"] for i in range(neighbours)}
    assert sum(parent == "leader" for parent in plan.values()) == min(neighbours, 32)
