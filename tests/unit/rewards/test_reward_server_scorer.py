"""Tests of a reward server's queue: its places, its memory, and requests whose clients have gone."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from starlette.exceptions import HTTPException

from async_flowrl.cli.scorer import PendingRequest, Scorer
from async_flowrl.rewards.http_contract import Limits, ScoreRequest, encode_image
from async_flowrl.types import ByteArray, Prompt

BYTES = 100
"""What each request reserves."""


def test_429_counts_those_that_wait_and_a_cancelled_request_frees_its_place_at_once() -> None:
    began, go, scored = threading.Event(), threading.Event(), list[str]()
    image = encode_image(np.zeros((4, 4, 3), dtype=np.uint8), "png")

    def slow(images: ByteArray, prompt: Prompt) -> list[float]:
        scored.append(prompt.text)
        began.set()
        assert go.wait(60)
        return [1.0] * len(images)

    async def gone() -> bool:
        return False

    async def test() -> None:
        scorer = Scorer(slow, Limits(waiting=2))

        async def asked(name: str) -> "asyncio.Task[Any]":
            pending = PendingRequest(gone, ScoreRequest([image], [Prompt(0, name)]))
            scorer.reserve(pending, BYTES)
            task = asyncio.create_task(scorer.reply(pending))
            await asyncio.sleep(0.05)
            return task

        first = await asked("first")
        assert await asyncio.to_thread(began.wait, 60)
        second, third, fourth = [await asked(name) for name in ("2", "3", "4")]
        with pytest.raises(HTTPException, match="a request is being scored and 2 are waiting already; ask again later"):
            await fourth
        assert scorer.reserved == 3 * BYTES
        second.cancel()
        await asyncio.wait([second])
        assert scorer.reserved == 2 * BYTES
        fifth = await asked("5")
        go.set()
        await asyncio.gather(first, third, fifth)
        assert scored == ["first", "3", "5"] and scorer.reserved == 0

    asyncio.run(asyncio.wait_for(test(), 60))
