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
import pytest

from async_flowrl.cli.reward_server import build_app
from async_flowrl.cli.scorer import Settings
from async_flowrl.rewards.endpoint import ServerError
from async_flowrl.rewards.http import HTTP
from async_flowrl.rewards.http_contract import Limits
from async_flowrl.types import ByteArray, Prompt
from tests.support.reward_server import served
from tests.unit.rewards.brightness_server import body, brightness, head, opened, picture, png, post, results


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


def test_connections_that_ask_nothing_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent ones, and those that never end their headers; one that is being answered stays."""
    monkeypatch.setattr("async_flowrl.cli.reward_server.ASK_SECONDS", 0.2)
    go = threading.Event()

    def slow(images: ByteArray, prompt: Prompt) -> list[Any]:
        go.wait(60)
        return brightness(images, prompt)

    content = json.dumps(body()).encode()
    with served(slow) as url, ExitStack() as stack:
        connections = opened(url, b"", b"GET /health HTTP/1.1\r\n", head(content) + content)
        silent, half, asking = (stack.enter_context(connection) for connection in connections)
        assert silent.recv(1) == b"" and half.recv(1) == b""
        go.set()
        assert asking.recv(15) == b"HTTP/1.1 200 OK"


def test_a_client_that_hangs_up_is_no_error_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    """A line in its log, and its bytes are given back."""
    content = json.dumps(body()).encode()
    settings = Settings(limits=Limits(body_bytes=len(content)), all_bytes=len(content))
    with served(brightness, settings) as url:
        (gone,) = opened(url, head(content) + b"{")
        gone.close()
        end = time.monotonic() + 60
        while "the client hung up" not in caplog.text and time.monotonic() < end:
            time.sleep(0.01)
        assert post(f"{url}/v1/score").status_code == 200
    assert "the client hung up after 1 bytes of the request" in caplog.text
    assert not [record for record in caplog.records if record.exc_info]


def look_twice(url: str) -> None:
    """When it has answered the second time, the server has seen all that was sent before the first."""
    for _ in range(2):
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200


def test_a_request_whose_client_hangs_up_while_it_waits_is_not_scored(caplog: pytest.LogCaptureFixture) -> None:
    """A client that gives up and asks again would otherwise have the server score more and more for nobody."""
    scored, began, go = list[str](), threading.Event(), threading.Event()

    def slow(images: ByteArray, prompt: Prompt) -> list[Any]:
        scored.append(prompt.text)
        began.set()
        go.wait(60)
        return brightness(images, prompt)

    first, second = (json.dumps(body(prompts=[name])).encode() for name in ("first", "second"))
    with served(slow) as url, ExitStack() as stack:
        (asking,) = (stack.enter_context(each) for each in opened(url, head(first) + first))
        assert began.wait(60)
        (waiting,) = opened(url, head(second) + second)
        look_twice(url)
        waiting.close()
        look_twice(url)
        go.set()
        assert asking.recv(15) == b"HTTP/1.1 200 OK"
        assert post(f"{url}/v1/score", body(prompts=["third"])).status_code == 200
    assert scored == ["first", "third"]
    assert "499 the client hung up before its turn" in caplog.text


def test_clients_that_hung_up_leave_their_places_and_their_memory_to_others() -> None:
    scored, began, go = list[str](), threading.Event(), threading.Event()

    def slow(images: ByteArray, prompt: Prompt) -> list[Any]:
        scored.append(prompt.text)
        began.set()
        go.wait(60)
        return brightness(images, prompt)

    first, gone, alive = (json.dumps(body(prompts=[name])).encode() for name in ("first", "gone", "alive"))
    with served(slow, Settings(waiting=1, all_bytes=3 * len(gone) - 9)) as url, ExitStack() as stack:
        (asking,) = (stack.enter_context(each) for each in opened(url, head(first) + first))
        assert began.wait(60)
        (waiting,) = opened(url, head(gone) + gone)
        look_twice(url)
        assert post(f"{url}/v1/score", body()).status_code == 429
        waiting.close()
        look_twice(url)
        (other,) = (stack.enter_context(each) for each in opened(url, head(alive) + alive))
        look_twice(url)
        go.set()
        assert [each.recv(15) for each in (asking, other)] == [b"HTTP/1.1 200 OK"] * 2
    assert scored == ["first", "alive"]


def test_a_cancelled_request_is_not_scored_beside_the_next_one() -> None:
    """Servers that cancel handlers exist; the thread that scores goes on, and the reward need not be thread-safe."""
    scored, under_way, most = list[str](), 0, 0
    began, go = threading.Event(), threading.Event()

    def slow(images: ByteArray, prompt: Prompt) -> list[Any]:
        nonlocal under_way, most
        scored.append(prompt.text)
        under_way += 1
        most = max(most, under_way)
        began.set()
        go.wait(60)
        under_way -= 1
        return brightness(images, prompt)

    async def asked() -> list[int]:
        content = body(images=[png()])
        settings = Settings(all_bytes=3 * len(json.dumps(content)) + 99)
        transport = httpx.ASGITransport(build_app(slow, settings))
        async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=None) as client:

            def ask(prompt: str) -> asyncio.Task[httpx.Response]:
                return asyncio.create_task(client.post("/v1/score", json={**content, "prompts": [prompt]}))

            first = ask("first")
            await asyncio.to_thread(began.wait, 60)
            second, third = ask("second"), ask("third")
            await asyncio.sleep(0.1)
            for each in (first, second):
                each.cancel()
            await asyncio.wait([first, second])
            full = await ask("large " + "x" * len(json.dumps(content)))
            asyncio.get_running_loop().call_later(0.2, go.set)
            replies = [full, await third, await ask("fourth")]
            return [reply.status_code for reply in replies]

    assert asyncio.run(asked()) == [429, 200, 200]
    assert (most, scored) == (1, ["first", "third", "fourth"])


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
