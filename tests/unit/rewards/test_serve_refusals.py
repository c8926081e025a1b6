"""Tests of what `serve-rewards` refuses in a sentence: requests, bodies, content types, and its command's arguments."""

import base64
import io
import pickle
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from PIL import Image

from async_flowrl.cli import serve_rewards as command
from async_flowrl.cli.reward_server import is_loopback
from async_flowrl.cli.scorer import Settings
from async_flowrl.config.compose import compose_config
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
    "gif": (body(images=[file_of(Image.new("RGB", (4, 4)), "GIF")]), 400, "image 0 is neither a PNG nor a JPEG file"),
    "16 bits": (body(images=[file_of(Image.new("I;16", (4, 4), 20_000), "PNG")]), 400, "image 0 has more than 8 bits"),
    "half": (body(images=[png(width=400)[:80]]), 400, "image 0 is damaged"),
    "bomb": (body(images=[header_of(50_000, 50_000)]), 413, "image 0 has far too many pixels"),
    "large": (body(images=[header_of(500, 400)]), 413, "image 0 has 500 x 400 pixels, more than 4096"),
    "bombs": (body(images=[header_of(64, 64)] * 4), 413, "more than 12288 pixels together"),
    "bytes": (body(images=["A" * 200_000]), 413, "the request has 200"),
    "no json": (b"{", 400, "the request is not JSON"),
    "nan": (b'{"version": NaN}', 400, "NaN is not a JSON number"),
    "422": (body(prompts=["no"]), 422, "such prompts are not scored"),
    "500": (body(prompts=["fail"]), 500, "the reward failed: ConnectionError: the model is away"),
    "exit": (body(prompts=["exit"]), 500, "the reward failed: SystemExit: 3"),
    "value": (body(prompts=["value"]), 500, "the reward failed: ValueError: could not convert string to float"),
    "few": (body(images=[png()] * 2, prompts=["few"]), 500, "the reward must return 2 finite numbers, got shape [1]"),
    "stop": (body(prompts=["stop"]), 500, "the reward failed: RuntimeError: StopIteration left the reward"),
    "deep": (b'{"a":' * 5000 + b"1" + b"}" * 5000, 400, "the request is not JSON"),
    "not finite": (body(prompts=["nan"]), 500, "the reward must return one finite number, got [nan]"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_sentences(url: str, name: str) -> None:
    asked, status, message = REFUSED[name]
    reply = post(f"{url}/v1/score", asked, headers={"Content-Type": "application/json"})
    assert reply.status_code == status and message in reply.json()["error"], reply.text
    assert reply.json()["version"] == 1 and post(f"{url}/v1/score").json()["scores"] == [7.0]


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
    served_here = "there are POST /v1/score and GET /health"
    for path in ("/", "/v1/score/", "/docs"):
        reply = post(f"{url}{path}", pickle.dumps({"images": []}))
        assert (reply.status_code, reply.json()) == (404, {"version": 1, "error": f"Not Found: {served_here}"})
    reply = httpx.get(f"{url}/v1/score", trust_env=False)
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
    assert reply.json() == {"version": 1, "error": f"Method Not Allowed: {served_here}"}
    multipart = {"Content-Type": "multipart/form-data; boundary=x"}
    assert "multipart" in post(f"{url}/v1/score", b"--y", headers=multipart).json()["error"]


def test_a_body_without_an_announced_length_is_cut_at_the_limit(url: str) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(50):
            yield b" " * 10_000

    with httpx.Client(trust_env=False) as client:
        reply = client.post(f"{url}/v1/score", content=chunks(), headers={"Content-Type": "application/json"})
    assert reply.status_code == 413 and "more than 100000" in reply.json()["error"]


def test_the_token() -> None:
    with served(brightness, Settings(token="s3cret")) as url:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer s3cret2"}):
            reply = post(f"{url}/v1/score", headers=headers)
            assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"
        assert post(f"{url}/v1/score", headers={"Authorization": "Bearer s3cret"}).json()["scores"] == [7.0]
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200


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
        (["rewards=color"], "configuration key rewards is unknown; did you mean 'reward=color'?"),
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
