"""Tests of `serve-rewards`: its scores, its refusals, and its limits."""

import asyncio
import base64
import io
import json
import pickle
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from async_flowrl.config.compose import compose_config
from async_flowrl.config.listening import is_loopback
from async_flowrl.rewards.http import HTTP
from async_flowrl.rewards.http_contract import Limits, encode_image
from async_flowrl.rewards.http_post import ServerError
from async_flowrl.serve_rewards import __main__ as command
from async_flowrl.serve_rewards.app import build_app
from async_flowrl.serve_rewards.scorer import PromptRefused, Settings
from async_flowrl.types import ByteArray, Prompt
from tests.support.reward_server import served

LIMITS = Limits(body_bytes=100_000, images=4, pixels=64 * 64, all_pixels=3 * 64 * 64)
PATHS = {"async_flowrl": "/v1/score", "flow_grpo": "/", "flow_factory": "/compute"}


def brightness(images: ByteArray, prompt: Prompt) -> list[Any]:
    """The mean, and how many images came together."""
    if prompt.text == "fail":
        raise ConnectionError("the model is away")
    if prompt.text == "nan":
        return [float("nan")] * len(images)
    if prompt.text == "no":
        raise PromptRefused("such prompts are not scored")
    if prompt.text == "value":
        raise ValueError("could not convert string to float")
    if prompt.text == "few":
        return [1.0] * (len(images) - 1)
    if prompt.text == "stop":
        return next(iter(()))
    return [{"score": float(image.mean()), "group": len(images), "prompt": prompt.text} for image in images]


def picture(value: int = 7, width: int = 8) -> ByteArray:
    return np.full((8, width, 3), value, dtype=np.uint8)


def png(value: int = 7, width: int = 8) -> str:
    return base64.b64encode(encode_image(picture(value, width), "png")).decode()


def body(**changes: Any) -> dict[str, Any]:
    return {"version": 1, "images": [png()], "prompts": ["a cup"], **changes}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(brightness, Settings(limits=LIMITS)) as address:
        yield address


def post(url: str, content: Any = None, **options: Any) -> httpx.Response:
    given = {"json": body() if content is None else content} if not isinstance(content, bytes) else {"content": content}
    with httpx.Client(trust_env=False, timeout=60) as client:
        return client.post(url, **given, **options)


def test_scores_extras_and_health(url: str) -> None:
    reply = post(f"{url}/v1/score", body(images=[png(1), png(2)]))
    extras = [{"group": 2.0, "prompt": "a cup"}] * 2
    assert reply.json() == {"version": 1, "scores": [1.0, 2.0], "extras": extras}
    assert httpx.get(f"{url}/health", trust_env=False).json() == {"status": "ok", "version": 1}


def test_neighbours_of_one_prompt_and_size_are_a_group(url: str) -> None:
    asked = body(images=[png(1), png(2), png(3), png(4, width=16)], prompts=["a", "b", "b", "b"])
    reply = post(f"{url}/v1/score", asked).json()
    assert reply["scores"] == [1, 2, 3, 4]
    assert [(extra["prompt"], extra["group"]) for extra in reply["extras"]] == [("a", 1), ("b", 2), ("b", 2), ("b", 1)]


def test_the_client_gets_the_bits_that_the_reward_gave(url: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    expected = [float(image.mean()) for image in noise]
    for options in ({}, {"encoding": "multipart"}, {"batch": "one_by_one"}):
        found = asyncio.run(_ask(HTTP(url, **options), noise))
        assert [each["score"] for each in found] == expected
    assert [each["score"] for each in asyncio.run(_ask(HTTP(url, encoding="jpeg"), noise))] != expected


async def _ask(reward: HTTP, images: ByteArray, prompt: str = "a cup") -> list[Any]:
    return await reward(images, Prompt(0, prompt))


def header_of(width: int, height: int) -> str:
    """A PNG of that size, according to its header, in 60 bytes."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()


def gif() -> str:
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, format="GIF")
    return base64.b64encode(file.getvalue()).decode()


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


REFUSED = {
    "version": (body(version=2), 400, "version must be 1, got 2"),
    "no images": (body(images=[]), 400, "images must be a list of at least one image"),
    "no list": (body(images="abc"), 400, "images must be a list"),
    "too many": (body(images=[png()] * 5), 413, "5 images are more than 4"),
    "prompts": (body(images=[png()] * 3, prompts=["a", "b"]), 400, "one prompt for all images, or of 3, one for each"),
    "no text": (body(prompts=[{"target": "x"}]), 400, "prompts[0] must be a text, or an object with a text"),
    "unknown": (body(prompts=[{"text": "x", "targets": "x"}]), 400, "unknown: 'targets'"),
    "unknown key": (body(model="x"), 400, "the request has version, images, prompts; unknown: model"),
    "no base64": (body(images=["a cup!"]), 400, "images[0] is not base64"),
    "no image": (body(images=[base64.b64encode(b"MZ" * 50).decode()]), 400, "image 0 is neither a PNG nor a JPEG file"),
    "gif": (body(images=[gif()]), 400, "image 0 is neither a PNG nor a JPEG file"),
    "half": (body(images=[png(width=400)[:80]]), 400, "image 0 is damaged"),
    "bomb": (body(images=[header_of(50_000, 50_000)]), 413, "image 0 has far too many pixels"),
    "large": (body(images=[header_of(500, 400)]), 413, "image 0 has 500 x 400 pixels, more than 4096"),
    "bombs": (body(images=[header_of(64, 64)] * 4), 413, "more than 12288 pixels together"),
    "bytes": (body(images=["A" * 200_000]), 413, "the request has 200"),
    "no json": (b"{", 400, "the request is not JSON"),
    "nan": (b'{"version": NaN}', 400, "NaN is not a JSON number"),
    "422": (body(prompts=["no"]), 422, "such prompts are not scored"),
    "500": (body(prompts=["fail"]), 500, "the reward failed: ConnectionError: the model is away"),
    "value": (body(prompts=["value"]), 500, "the reward failed: ValueError: could not convert string to float"),
    "few": (body(images=[png()] * 2, prompts=["few"]), 500, "the reward must return 2 finite numbers, got shape [1]"),
    "stop": (body(prompts=["stop"]), 500, "the reward failed: RuntimeError: StopIteration left the reward"),
    "deep": (body(prompts=[{"text": "x", "metadata": nested(900)}]), 400, "metadata of a prompt is nested too deeply"),
    "not finite": (body(prompts=["nan"]), 500, "the reward must return one finite number, got [nan]"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_sentences(url: str, name: str) -> None:
    asked, status, message = REFUSED[name]
    reply = post(f"{url}/v1/score", asked, headers={"Content-Type": "application/json"})
    assert reply.status_code == status and message in reply.json()["error"], reply.text


def test_a_fault_of_the_reward_is_logged_with_its_traceback(url: str, caplog: pytest.LogCaptureFixture) -> None:
    assert post(f"{url}/v1/score", body(prompts=["value"])).status_code == 500
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.exc_info and isinstance(record.exc_info[1], ValueError)


def test_weights_that_are_not_there_are_a_fault_of_the_server(tmp_path: Path) -> None:
    terms = f"{{clip_score: {{options: {{model: {tmp_path / 'none'}}}}}}}"
    config = compose_config("one_step_off", ["~reward", f"+reward={{terms: {terms}}}"]).reward
    with served(command.scorer(config)) as url:
        reply = post(f"{url}/v1/score")
    assert reply.status_code == 500 and "is no file or folder here" in reply.json()["error"]


def test_other_content_types_methods_and_pickles_are_refused(url: str) -> None:
    assert post(f"{url}/v1/score", b"x", headers={"Content-Type": "text/plain"}).status_code == 415
    assert post(f"{url}/v1/score", pickle.dumps(body())).status_code == 415
    assert post(f"{url}/", pickle.dumps({"images": []})).status_code == 404
    assert httpx.get(f"{url}/v1/score", trust_env=False).status_code == 405
    multipart = {"Content-Type": "multipart/form-data; boundary=x"}
    assert "multipart" in post(f"{url}/v1/score", b"--y", headers=multipart).json()["error"]


def test_a_body_without_an_announced_length_is_cut_at_the_limit(url: str) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(50):
            yield b" " * 10_000

    with httpx.Client(trust_env=False) as client:
        reply = client.post(f"{url}/v1/score", content=chunks(), headers={"Content-Type": "application/json"})
    assert reply.status_code == 413 and "more than 100000" in reply.json()["error"]


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
            connection.sendall(_head(content) + content[:5])
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


def _idle(url: str, *sent: bytes) -> list[socket.socket]:
    place = ("127.0.0.1", int(url.rpartition(":")[2]))
    connections = [socket.create_connection(place) for _ in sent]
    for connection, head in zip(connections, sent, strict=True):
        connection.settimeout(60)
        connection.sendall(head)
    return connections


def _head(content: bytes) -> bytes:
    fields = {"Host": "x", "Content-Type": "application/json", "Content-Length": len(content)}
    lines = ["POST /v1/score HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def test_connections_that_ask_nothing_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent ones, and those that never end their headers; one that is being answered stays."""
    monkeypatch.setattr("async_flowrl.serve_rewards.connections.ASK_SECONDS", 0.2)
    go = threading.Event()

    def slow(images: ByteArray, prompt: Prompt) -> list[Any]:
        go.wait(60)
        return brightness(images, prompt)

    content = json.dumps(body()).encode()
    with served(slow) as url, ExitStack() as stack:
        connections = _idle(url, b"", b"GET /health HTTP/1.1\r\n", _head(content) + content)
        silent, half, asking = (stack.enter_context(connection) for connection in connections)
        assert silent.recv(1) == b"" and half.recv(1) == b""
        go.set()
        assert asking.recv(15) == b"HTTP/1.1 200 OK"


def test_a_client_that_hangs_up_is_no_error_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    """A line in its log, and its bytes are given back."""
    content = json.dumps(body()).encode()
    settings = Settings(limits=Limits(body_bytes=len(content)), all_bytes=len(content))
    with served(brightness, settings) as url:
        (gone,) = _idle(url, _head(content) + b"{")
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
        (asking,) = (stack.enter_context(each) for each in _idle(url, _head(first) + first))
        assert began.wait(60)
        (waiting,) = _idle(url, _head(second) + second)
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
        (asking,) = (stack.enter_context(each) for each in _idle(url, _head(first) + first))
        assert began.wait(60)
        (waiting,) = _idle(url, _head(gone) + gone)
        look_twice(url)
        assert post(f"{url}/v1/score", body()).status_code == 429
        waiting.close()
        look_twice(url)
        (other,) = (stack.enter_context(each) for each in _idle(url, _head(alive) + alive))
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


def test_the_token() -> None:
    with served(brightness, Settings(token="s3cret")) as url:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer s3cret2"}):
            reply = post(f"{url}/v1/score", headers=headers)
            assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"
        assert post(f"{url}/v1/score", headers={"Authorization": "Bearer s3cret"}).json()["scores"] == [7.0]
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200


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
        calls = [_ask(HTTP(url, **options), picture()[None], str(number)) for number in range(count)]
        threading.Timer(0.5, go.set).start()
        return await asyncio.gather(*calls, return_exceptions=True)

    with served(slow, Settings(waiting=3)) as url:
        assert asyncio.run(several(url, 4)) == [[0.0], [1.0], [2.0], [3.0]]
        assert most == 1
        go.clear()
        found = asyncio.run(several(url, 6, retries=0))
        busy = [str(each) for each in found if isinstance(each, ServerError)]
        assert len(busy) == 2 and all("429" in each and "ask again later" in each for each in busy)


def test_the_dialects_of_other_trainers() -> None:
    with served(brightness, Settings(dialect="flow_factory")) as url:
        assert [*asyncio.run(_ask(HTTP(url, dialect="flow_factory"), picture(5)[None]))] == [5.0]
        theirs = {"prompt": ["a", "b"], "image": [png(1), png(2)], "video": None}
        assert post(f"{url}/compute", theirs).json() == {"rewards": [1.0, 2.0]}
        assert post(f"{url}/", pickle.dumps({})).status_code == 404
    with served(brightness, Settings(dialect="flow_grpo")) as url:
        assert len(asyncio.run(_ask(HTTP(url, dialect="flow_grpo"), picture(5)[None]))) == 1
        files = [encode_image(picture(value), "png") for value in (1, 2)]
        unified = pickle.dumps({"images": files, "prompts": np.array(["a", "b"])})
        assert pickle.loads(post(f"{url}/", unified).content)["outputs"] == [1.0, 2.0]
        geneval = pickle.dumps({"images": files, "meta_datas": [{"prompt": "a", "tag": "x"}] * 2, "only_strict": True})
        assert pickle.loads(post(f"{url}/", geneval).content)["scores"] == [1.0, 2.0]
        refused = post(f"{url}/", pickle.dumps({"images": files, "prompts": [eval]}))
        assert refused.status_code == 400 and "builtins.eval" in pickle.loads(refused.content)["error"]


def test_any_reward_of_ours_is_served_with_its_terms() -> None:
    terms = "{color: {weight: 2.0}, jpeg_compressibility: {weight: 0.5}}"
    config = compose_config("one_step_off", ["~reward", f"+reward={{terms: {terms}}}"]).reward
    with served(command.scorer(config)) as url:
        noise = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), dtype=np.uint8)
        for each in asyncio.run(_ask(HTTP(url), noise, "red")):
            assert each["score"] == 2.0 * each["color"] + 0.5 * each["jpeg_compressibility"]
        with pytest.raises(ServerError, match=r"422 .*must be one of blue, green, red"):
            asyncio.run(_ask(HTTP(url), noise, "purple"))
    config = compose_config("one_step_off", ["reward=ocr"]).reward
    with served(command.scorer(config)) as url, pytest.raises(ServerError, match="the reward needs a target"):
        asyncio.run(_ask(HTTP(url), noise, "no quotes"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 is not this machine alone"),
        (["--host", "::"], "name a token with --token-env or --token-file"),
        (["--token-env", "TEST_NO_SUCH"], "--token-env TEST_NO_SUCH: there is no such environment variable"),
        (["--token-file", "/no/such"], "--token-file /no/such cannot be read: No such file"),
        (["--max-all-bytes", "99"], "--max-all-bytes 99 is less than one request, --max-bytes 268435456"),
        (["--max-pixels", "0"], "--max-pixels must be at least 1, got 0"),
        (["reward=color", "--warm-up", "purple"], "--warm-up 'purple': reward 'color': the first word"),
        (["reward=colour"], "did you mean 'color'"),
        (["--host", "192.0.2.1", "--token-env", "HOME"], "cannot listen at 192.0.2.1"),
        (["~reward", "+reward={terms: {x: {serve: {command: 'a {port}'}}}}"], "servers are started by runs"),
    ],
)
def test_the_command_refuses_in_a_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_loopback() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", ""))
