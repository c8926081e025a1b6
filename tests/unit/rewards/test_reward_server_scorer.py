"""Tests of a reward server's queue: its places, its memory, and requests whose clients have gone."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from starlette.exceptions import HTTPException

from async_flowrl.cli.scorer import PendingRequest, Scorer
from async_flowrl.rewards.http_contract import Limits, ScoreRequest, encode_image
from async_flowrl.types import ByteArray, Prompt

BYTES = 100
"""What each request of these tests reserves."""


@dataclass
class Slow:
    """A reward that waits until it may go on; it counts the images of each call."""

    go: threading.Event = field(default_factory=threading.Event)
    began: threading.Event = field(default_factory=threading.Event)
    called: list[tuple[str, int]] = field(default_factory=list)

    def __call__(self, images: ByteArray, prompt: Prompt) -> list[float]:
        self.called.append((prompt.text, len(images)))
        self.began.set()
        assert self.go.wait(60)
        return [1.0] * len(images)


@dataclass
class Client:
    """Whether a client has hung up; `looked` is called while the server finds that out."""

    hung_up: bool = False
    looked: Callable[[], None] = lambda: None

    async def gone(self) -> bool:
        self.looked()
        await asyncio.sleep(0)
        return self.hung_up


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def request(*prompts: Prompt | str) -> ScoreRequest:
    image = encode_image(np.zeros((4, 4, 3), dtype=np.uint8), "png")
    read = [Prompt(0, prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    return ScoreRequest([image] * len(read), read)


def asked(scorer: Scorer, wanted: ScoreRequest, client: Client | None = None) -> PendingRequest:
    pending = PendingRequest((client or Client()).gone, wanted)
    scorer.reserve(pending, BYTES)
    return pending


async def begun(scorer: Scorer, reward: Slow, wanted: ScoreRequest, client: Client | None = None) -> asyncio.Task[Any]:
    """A request whose first group is being scored."""
    task = asyncio.create_task(scorer.reply(asked(scorer, wanted, client)))
    assert await asyncio.to_thread(reward.began.wait, 60)
    return task


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_429_counts_those_that_wait_and_a_cancelled_request_frees_its_place_at_once() -> None:
    async def test() -> None:
        reward = Slow()
        scorer = Scorer(reward, Limits(waiting=2))
        first = await begun(scorer, reward, request("first"))
        second, third = (asyncio.create_task(scorer.reply(asked(scorer, request(name)))) for name in ("2", "3"))
        await settled()
        with pytest.raises(HTTPException, match="a request is being scored and 2 are waiting already; ask again later"):
            await scorer.reply(asked(scorer, request("4")))
        assert scorer.reserved == 3 * BYTES
        second.cancel()
        await settled()
        assert scorer.reserved == 2 * BYTES
        fifth = asyncio.create_task(scorer.reply(asked(scorer, request("5"))))
        await settled()
        reward.go.set()
        await asyncio.gather(first, third, fifth)
        assert [name for name, _ in reward.called] == ["first", "3", "5"] and scorer.reserved == 0

    run(test())
