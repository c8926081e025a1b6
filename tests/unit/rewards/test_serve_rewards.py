"""Tests of `serve-rewards`: its scores and extras, its refusals, and its queue."""

import asyncio
import base64
import io
import json
import re
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from starlette.exceptions import HTTPException

from async_flowrl.cli import serve_rewards as command
from async_flowrl.cli.scorer import PendingRequest, Scorer
from async_flowrl.cli.serve_rewards import scorer
from async_flowrl.config.compose import compose_config
from async_flowrl.rewards.endpoint import ServerError
from async_flowrl.rewards.http import HTTP
from async_flowrl.rewards.http_contract import Limits, ScoreRequest, encode_image, read_reply
from async_flowrl.rewards.registry import check_rewards
from async_flowrl.types import ByteArray, Prompt
from tests.support.reward_server import served
from tests.unit.rewards.brightness_server import body, brightness, picture, png, post, results


def test_scores_extras_and_health(url: str) -> None:
    reply = post(f"{url}/v1/score", body(images=[png(1), png(2)]))
    extras = [{"group": 2.0, "prompt": "a cup"}] * 2
    assert reply.json() == {"version": 1, "scores": [1.0, 2.0], "extras": extras}
    assert httpx.get(f"{url}/health", trust_env=False).json() == {"status": "ok", "version": 1}


def test_the_client_gets_the_bits_that_the_reward_gave(url: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    expected = [float(image.mean()) for image in noise]
    for options in ({}, {"encoding": "multipart"}, {"batch": "one_by_one"}):
        found = asyncio.run(results(HTTP(url, **options), noise))
        assert [each["score"] for each in found] == expected
    assert [each["score"] for each in asyncio.run(results(HTTP(url, encoding="jpeg"), noise))] != expected


@pytest.mark.extended
def test_any_reward_of_ours_is_served_with_its_terms() -> None:
    terms = "{color: {weight: 2.0}, jpeg_compressibility: {weight: 0.5}}"
    config = compose_config("one_step_off", ["~reward", f"+reward={{terms: {terms}}}"]).reward
    with served(command.scorer(config)) as url:
        noise = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), dtype=np.uint8)
        for each in asyncio.run(results(HTTP(url), noise, "red")):
            assert each["score"] == 2.0 * each["color"] + 0.5 * each["jpeg_compressibility"]
        with pytest.raises(ServerError, match=r"422 .*must be one of blue, green, red"):
            asyncio.run(results(HTTP(url), noise, "purple"))
    for name in ("refuses", "refuses_in_a_group", "RefusesOne"):
        terms = f"{{mine: {{name: 'tests.unit.rewards.own_rewards:{name}'}}}}"
        config = compose_config("one_step_off", ["~reward", f"+reward={{terms: {terms}}}"]).reward
        with served(command.scorer(config)) as url:
            reply = post(f"{url}/v1/score")
        told = {"version": 1, "error": "reward 'mine': such prompts are not scored"}
        assert (reply.status_code, reply.json()) == (422, told)
    config = compose_config("one_step_off", ["reward=ocr"]).reward
    with served(command.scorer(config)) as url, pytest.raises(ServerError, match="the reward needs a target"):
        asyncio.run(results(HTTP(url), noise, "no quotes"))


def header_of(width: int, height: int) -> str:
    """A PNG of that size, according to its header, in 60 bytes."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(parts)).decode()


def file_of(image: Image.Image, kind: str) -> str:
    file = io.BytesIO()
    image.save(file, format=kind)
    return base64.b64encode(file.getvalue()).decode()


def test_a_server_that_would_ask_itself_does_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["reward=http"]) == 2, "both are at port 8000 by default"
    assert "reward.terms.http.options.url" in capsys.readouterr().err


REFUSED = {
    "too many": (body(images=[png()] * 5), 413, "5 images are more than 4"),
    "prompts": (body(images=[png()] * 3, prompts=["a", "b"]), 400, "one prompt for all images, or of 3, one for each"),
    "no text": (body(prompts=[{"target": "x"}]), 400, "prompts[0] must be a text, or an object with a text"),
    "unknown": (body(prompts=[{"text": "x", "targets": "x"}]), 400, "unknown: 'targets'"),
    "no base64": (body(images=["a cup!"]), 400, "images[0] is not base64"),
    "no image": (body(images=[base64.b64encode(b"MZ" * 50).decode()]), 400, "image 0 is neither a PNG nor a JPEG file"),
    "16 bits": (body(images=[file_of(Image.new("I;16", (4, 4), 20_000), "PNG")]), 400, "image 0 has more than 8 bits"),
    "bomb": (body(images=[header_of(50_000, 50_000)]), 413, "image 0 has far too many pixels"),
    "large": (body(images=[header_of(500, 400)]), 413, "image 0 has 500 x 400 pixels, more than 4096"),
    "bombs": (body(images=[header_of(64, 64)] * 4), 413, "more than 12288 pixels together"),
    "no json": (b"{", 400, "the request is not JSON"),
    "422": (body(prompts=["no"]), 422, "such prompts are not scored"),
    "500": (body(prompts=["fail"]), 500, "the reward failed: ConnectionError: the model is away"),
    "deep": (b"[" * 45_000 + b"]" * 45_000, 400, "the request is not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_sentences(url: str, name: str) -> None:
    asked, status, message = REFUSED[name]
    reply = post(f"{url}/v1/score", asked, headers={"Content-Type": "application/json"})
    assert reply.status_code == status and message in reply.json()["error"], reply.text
    assert reply.json()["version"] == 1 and post(f"{url}/v1/score").json()["scores"] == [7.0]


def test_a_body_without_an_announced_length_is_cut_at_the_limit(url: str) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(50):
            yield b" " * 10_000

    with httpx.Client(trust_env=False) as client:
        reply = client.post(f"{url}/v1/score", content=chunks(), headers={"Content-Type": "application/json"})
    assert reply.status_code == 413 and "more than 100000" in reply.json()["error"]


def test_the_token() -> None:
    with served(brightness, token="s3cret") as url:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer s3cret2"}):
            reply = post(f"{url}/v1/score", headers=headers)
            assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"
        assert post(f"{url}/v1/score", headers={"Authorization": "Bearer s3cret"}).json()["scores"] == [7.0]
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200


def test_429_counts_those_that_wait_and_a_cancelled_request_frees_its_place_at_once() -> None:
    began, go, scored = threading.Event(), threading.Event(), list[str]()

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
            pending = PendingRequest(gone, ScoreRequest([encode_image(picture(), "png")], [Prompt(0, name)]))
            scorer.reserve(pending, 100)
            task = asyncio.create_task(scorer.reply(pending))
            await asyncio.sleep(0.05)
            return task

        first = await asked("first")
        assert await asyncio.to_thread(began.wait, 60)
        second, third, fourth = [await asked(name) for name in ("2", "3", "4")]
        with pytest.raises(HTTPException, match="a request is being scored and 2 are waiting already") as error:
            await fourth
        assert error.value.status_code == 429 and "Retry-After" in (error.value.headers or {})
        assert scorer.reserved == 300 and scored == ["first"], "one after the other"
        second.cancel()
        await asyncio.wait([second])
        assert scorer.reserved == 200
        fifth = await asked("5")
        go.set()
        await asyncio.gather(first, third, fifth)
        assert scored == ["first", "3", "5"] and scorer.reserved == 0

    asyncio.run(asyncio.wait_for(test(), 60))


PAGE = (Path(__file__).parents[3] / "docs" / "rewards" / "http.md").read_text(encoding="utf-8")
BLOCKS = {name: json.loads(text) for name, text in re.findall(r"```json (\w+)\n(.*?)```", PAGE, re.DOTALL)}


def test_the_examples_are_what_is_said() -> None:
    """The page's picture is 2 x 2 pixels of pure red; the weight of the served term is 2."""
    file = base64.b64decode(BLOCKS["request"]["images"][0])
    assert (np.asarray(Image.open(io.BytesIO(file))) == [255, 0, 0]).all()
    config = compose_config("one_step_off", ["reward.terms.color.weight=2"]).reward
    with served(scorer(config)) as url, httpx.Client(trust_env=False) as client:
        reply = client.post(f"{url}/v1/score", json=BLOCKS["request"])
        assert reply.json() == BLOCKS["reply"]
        assert read_reply(reply.content, 1) == [{"score": 2.0, "color": 1.0}]
        wrong = BLOCKS["request"] | {"images": BLOCKS["request"]["images"] * 2, "prompts": ["red"] * 3}
        refused = client.post(f"{url}/v1/score", json=wrong)
        assert (refused.status_code, refused.json()) == (400, BLOCKS["refusal"])


@pytest.mark.extended
@pytest.mark.parametrize("number", range(2))
def test_the_configurations_of_the_page_are_accepted(number: int, tmp_path: Path) -> None:
    terms = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[number]
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "page.yaml").write_text(terms)
    config = compose_config("one_step_off", ["reward=page"], tmp_path).reward
    assert not check_rewards(config)
