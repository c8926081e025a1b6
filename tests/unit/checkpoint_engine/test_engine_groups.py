"""Tests of groups over gloo: a stranger, and more receivers than are allowed, of which one per node is in the group."""

import asyncio
from typing import Any

import pytest

from checkpoint_engine import RING, Header, TransferFailed
from checkpoint_engine.base import parents
from checkpoint_engine.process_group import Epoch
from examples.checkpoint_engine.piped_processes import SharedPayload
from tests.support.live import live_digest
from tests.unit.checkpoint_engine.engine_local import Local, linked
from tests.unit.checkpoint_engine.engine_parts import lora


def test_a_stranger_with_another_secret_cannot_join_and_disturbs_nobody() -> None:
    async def main() -> None:
        tensors = lora()
        end, stranger = Local(tensors, "a"), Local(tensors, "stranger")
        async with linked(tensors, [end]) as made:
            guess = Epoch("gloo", 1, "guess", *await made.sender.address(), world=2, seconds=1.0)
            intrusion = asyncio.create_task(stranger.open_group(guess, 1))
            await asyncio.sleep(0.2)
            await made.publish(0)
            assert end.receiver.activate("policy", 0) == made.publisher.payload(0)[0].digest
            assert made.delivery.stats.fallbacks == 0
            with pytest.raises(TransferFailed, match="epoch 1 could not be opened as rank 1"):
                await intrusion
            with pytest.raises(TransferFailed, match="before the members were ready"):
                await stranger.accept(made.publisher.draft(1))

    asyncio.run(main())


class Relaying(Local):
    """A receiver that passes versions on to its neighbours, unless it is deaf."""

    deaf = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.passed_on: list[int] = []

    async def relay(self, header: Header, slot: str = RING) -> Any:
        if self.deaf:
            raise TransferFailed("it does not pass on")
        self.passed_on.append(header.version)
        return SharedPayload(self.receiver.export(header.stream, header.version, slot=slot)[1])


@pytest.mark.parametrize("deaf", [False, True])
def test_a_group_above_the_limit_has_one_member_per_node_and_everyone_gets_the_version(deaf: bool) -> None:
    async def main() -> None:
        tensors = lora(width=128)
        ends = [Relaying(tensors, f"r{i}", f"n{i // 3}") for i in range(6)]
        ends[0].deaf = deaf
        async with linked(tensors, ends, max_members=2) as made:
            for version in range(2):
                await made.publish(version)
                digest = made.publisher.payload(version)[0].digest
                assert {end.receiver.activate("policy", version) for end in ends} == {digest}
                assert {live_digest(end.receiver) for end in ends} == {digest}
                for tensor in tensors.values():
                    tensor.mul_(1.5)
        assert [member.name for member in made.broadcast.members] == ["r0", "r3"]
        assert ends[3].passed_on == [0, 1] and ends[0].passed_on == ([] if deaf else [0, 1])
        assert made.delivery.stats.fallbacks == (4 if deaf else 0), "the sender serves whoever a leader fails"

    asyncio.run(main())


@pytest.mark.parametrize("neighbours", [3, 40])
def test_who_has_a_version_serves_its_node_and_the_sender_the_others(neighbours: int) -> None:
    nodes = {f"w{i}": "n0" for i in range(neighbours)} | {"far": "n9"}
    plan = parents(nodes, {"n0": "leader", "n1": "idle"})
    assert plan["far"] is None and plan["w0"] == "leader" and "idle" not in plan.values()
    assert set(plan) == set(nodes) and None not in {plan[f"w{i}"] for i in range(neighbours)}
    assert sum(parent == "leader" for parent in plan.values()) == min(neighbours, 32)
