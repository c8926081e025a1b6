"""Tests of several clients of `serve-rewards` at once: they wait their turn, hang up, ask nothing, or are too many."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx

from async_flowrl.cli.scorer import Settings
from async_flowrl.rewards.endpoint import ServerError
from async_flowrl.rewards.http import HTTP
from async_flowrl.rewards.http_contract import Limits
from async_flowrl.types import ByteArray, Prompt
from tests.support.reward_server import served
from tests.unit.rewards.brightness_server import body, brightness, head, picture, post, results


def test_the_bodies_of_all_requests_together_are_bounded() -> None:
    """One that arrives slowly holds its announced size until it has its reply, and then gives it back."""
    content = json.dumps(body()).encode()
    settings = Settings(limits=Limits(body_bytes=2 * len(content)), all_bytes=2 * len(content) + 10)

    def chunks() -> Iterator[bytes]:
        yield content

    with served(brightness, settings) as url, ExitStack() as stack:
        place = ("127.0.0.1", int(url.rpartition(":")[2]))
        slow = [stack.enter_context(socket.create_connection(place)) for _ in range(2)]
        for connection in slow:
            connection.sendall(head(content) + content[:5])
        end = time.monotonic() + 60
        while (reply := post(f"{url}/v1/score")).status_code == 200 and time.monotonic() < end:
            pass  # the slow ones' heads are still on their way
        assert reply.status_code == 429 and reply.headers["retry-after"] == "1"
        assert f"all requests together have {settings.all_bytes} bytes already" in reply.json()["error"]
        with httpx.Client(trust_env=False) as client:  # without an announced length
            headers = {"Content-Type": "application/json"}
            assert client.post(f"{url}/v1/score", content=chunks(), headers=headers).status_code == 429
        for connection in slow:
            connection.sendall(content[5:])
            assert connection.recv(15) == b"HTTP/1.1 200 OK"
        assert post(f"{url}/v1/score").status_code == 200


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

    with served(slow, Settings(waiting=3)) as url:
        assert asyncio.run(several(url, 4)) == [[0.0], [1.0], [2.0], [3.0]]
        assert most == 1
        go.clear()
        found = asyncio.run(several(url, 6, retries=0))
        busy = [str(each) for each in found if isinstance(each, ServerError)]
        assert len(busy) == 2 and all("429" in each and "ask again later" in each for each in busy)
