"""Test of a process group that a stranger tries to join."""

import asyncio

import pytest

from checkpoint_engine import TransferFailed
from checkpoint_engine.process_group import Epoch
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
