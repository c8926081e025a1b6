"""Tests of what `serve-rewards` refuses in a sentence: requests, bodies, content types, and its command's arguments."""

import base64
import io
import struct
import zlib
from collections.abc import Iterator

import httpx
import pytest
from PIL import Image

from tests.support.reward_server import served
from tests.unit.rewards.brightness_server import body, brightness, png, post


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
    "deep": (b'{"a":' * 5000 + b"1" + b"}" * 5000, 400, "the request is not JSON"),
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
