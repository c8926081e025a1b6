"""Calls of the http reward to a server on the loopback interface, for its tests."""

import asyncio
import json
from typing import Any

import numpy as np

from async_flowrl.rewards.http import HTTP
from async_flowrl.types import ByteArray, Prompt
from tests.support.lying_server import LyingServer, answer

PROMPT = Prompt(3, "a red cup", target="cup", metadata={"count": 2})


def images(count: int = 2) -> ByteArray:
    return np.random.default_rng(0).integers(0, 256, (count, 8, 6, 3), dtype=np.uint8)


def ask(server: LyingServer | str | list[str], count: int = 2, **options: Any) -> list[Any]:
    url = server.url if isinstance(server, LyingServer) else server
    return asyncio.run(call(HTTP(url, **{"retries": 1, "timeout": 5.0, **options}), count))


async def call(reward: HTTP, count: int = 2) -> list[Any]:
    return await reward(images(count), PROMPT)


def scores(*numbers: float, **more: Any) -> bytes:
    return answer("200 OK", json.dumps({"version": 1, "scores": list(numbers), **more}))
