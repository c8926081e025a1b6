"""Tests of several clients of `serve-rewards` at once: they wait their turn, hang up, ask nothing, or are too many."""

import asyncio
import threading
from typing import Any

from async_flowrl.rewards.endpoint import ServerError
from async_flowrl.rewards.http import HTTP
from async_flowrl.rewards.http_contract import Limits
from async_flowrl.types import ByteArray, Prompt
from tests.support.reward_server import served
from tests.unit.rewards.brightness_server import picture, results


def test_several_clients_are_scored_one_after_the_other_and_too_many_are_told_to_wait() -> None:
    under_way, most, lock, go = 0, 0, threading.Lock(), threading.Event()

    def slow(images: ByteArray, prompt: Prompt) -> list[float]:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        go.wait(60)
        with lock:
            under_way -= 1
        return [float(prompt.text)] * len(images)

    async def several(url: str, count: int, **options: Any) -> list[Any]:
        calls = [results(HTTP(url, **options), picture()[None], str(number)) for number in range(count)]
        threading.Timer(0.5, go.set).start()
        return await asyncio.gather(*calls, return_exceptions=True)

    with served(slow, Limits(waiting=3)) as url:
        assert asyncio.run(several(url, 4)) == [[0.0], [1.0], [2.0], [3.0]]
        assert most == 1
        go.clear()
        found = asyncio.run(several(url, 6, retries=0))
        busy = [str(each) for each in found if isinstance(each, ServerError)]
        assert len(busy) == 2 and all("429" in each and "ask again later" in each for each in busy)
