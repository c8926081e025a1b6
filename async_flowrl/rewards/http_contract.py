"""The contract of reward servers, version 1: what a request and a reply hold, and how images travel in them.

docs/rewards/http.md is its text. Nothing heavy is imported here: servers with an environment of their own read it too.
"""

import base64
import binascii
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from async_flowrl.types import ByteArray, Prompt

VERSION = 1
PATH, HEALTH = "/v1/score", "/health"
FORMATS = ("png", "jpeg")
"""png is lossless. jpeg, at quality 95, is smaller and scores other pixels than were generated."""
JPEG_QUALITY = 95
SHOWN_CHARACTERS = 200
"""Of a reply that cannot be used, as many are quoted in the error."""


class ContractError(ValueError):
    """A request or a reply that is not as the contract says; the message is one sentence."""


class TooMuch(ContractError):
    """A request beyond the server's limits."""


@dataclass(frozen=True)
class Limits:
    """What a server takes; all is checked before anything is decoded."""

    body_bytes: int = 256 * 2**20
    images: int = 256
    pixels: int = 4096 * 4096
    """Of one image."""
    all_pixels: int = 256 * 1024 * 1024
    """Of all images of a request together: three bytes each, decoded."""


@dataclass(frozen=True)
class ScoreReply:
    """Scores in image order, and per image what else the reward had to say."""

    scores: tuple[float, ...]
    extras: tuple[Mapping[str, float | str], ...] = ()


@dataclass(frozen=True)
class ScoreRequest:
    """Encoded images and, for each, its prompt."""

    images: Sequence[bytes]
    prompts: Sequence[Prompt]


def encode_image(image: ByteArray, kind: str) -> bytes:
    """A uint8 [H, W, 3] image as the bytes of a PNG (quickly rather than small) or a JPEG file."""
    file = io.BytesIO()
    options: dict[str, Any] = {"compress_level": 1} if kind == "png" else {"quality": JPEG_QUALITY}
    Image.fromarray(np.ascontiguousarray(image)).save(file, format=kind, **options)
    return file.getvalue()


def decode_images(images: Sequence[bytes], limits: Limits) -> list[ByteArray]:
    """uint8 [H, W, 3] each. The sizes that the files' headers name are compared with the limits before any is decoded.

    Raises ContractError, TooMuch where it is only too large.
    """
    opened, pixels = [], 0
    for index, data in enumerate(images):
        image = _open(index, data)
        size = image.width * image.height
        pixels += size
        if size > limits.pixels:
            raise TooMuch(f"image {index} has {image.width} x {image.height} pixels, more than {limits.pixels}")
        if pixels > limits.all_pixels:
            raise TooMuch(f"the images have more than {limits.all_pixels} pixels together; send fewer at once")
        opened.append(image)
    return [_decode(index, image) for index, image in enumerate(opened)]


def _open(index: int, data: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data), formats=[name.upper() for name in FORMATS])
    except Image.DecompressionBombError as error:
        raise TooMuch(f"image {index} has far too many pixels: {error}") from error
    except (OSError, ValueError, SyntaxError) as error:
        raise ContractError(f"image {index} is neither a PNG nor a JPEG file, {len(data)} bytes") from error


def _decode(index: int, image: Image.Image) -> ByteArray:
    try:
        return np.asarray(image.convert("RGB"), dtype=np.uint8)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ContractError(f"image {index} is damaged: {error}") from error


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """A prompt as JSON: its text, target, negative and metadata. Raises ValueError for what JSON cannot say."""
    optional = {"target": prompt.target, "negative": prompt.negative, "metadata": dict(prompt.metadata)}
    fields = {"text": prompt.text, **{name: value for name, value in optional.items() if value}}
    try:
        json.dumps(fields, default=_plain, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the metadata of prompt {prompt.text!r:.80} cannot be written as JSON: {error}") from error
    return fields


def _plain(value: object) -> Any:
    """Columns of parquet files may be numpy's."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def dumps(value: Mapping[str, Any]) -> bytes:
    """JSON, UTF-8; floats so that they are read back bit for bit."""
    return json.dumps(value, default=_plain, allow_nan=False, ensure_ascii=False).encode()


def loads(body: bytes, what: str) -> dict[str, Any]:
    """A JSON object. Raises ContractError; `what` is "the reply", say."""
    try:
        value = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ContractError(f"{what} is not JSON ({error}): {shown(body)}") from error
    if not isinstance(value, dict):
        raise ContractError(f"{what} must be a JSON object, got {type(value).__name__}")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def shown(body: bytes) -> str:
    """The beginning of a body on one line, for an error."""
    text = " ".join(body[: 4 * SHOWN_CHARACTERS].decode("utf-8", "replace").split())
    return repr(text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…")


def request_body(images: Sequence[bytes], prompts: Sequence[Mapping[str, Any]]) -> bytes:
    """The JSON request of encoded images; one prompt for all of them, or one each."""
    encoded = [base64.b64encode(image).decode() for image in images]
    return dumps({"version": VERSION, "images": encoded, "prompts": list(prompts)})


def read_request(fields: Mapping[str, Any], files: Sequence[bytes] | None, limits: Limits) -> ScoreRequest:
    """A request of either encoding: its JSON, and the images' files where they came beside it. Raises ContractError."""
    if (version := fields.get("version")) != VERSION:
        raise ContractError(f"version must be {VERSION}, got {version!r:.20}")
    known = ("version", "prompts") if files is not None else ("version", "images", "prompts")
    if unknown := sorted(set(fields) - set(known)):
        raise ContractError(f"the request has {', '.join(known)}; unknown: {', '.join(unknown)[:80]}")
    given = files if files is not None else fields.get("images")
    if not isinstance(given, list | tuple) or not given:
        raise ContractError("images must be a list of at least one image")
    if len(given) > limits.images:
        raise TooMuch(f"{len(given)} images are more than {limits.images}")
    images = list(files) if files is not None else [_from_base64(index, text) for index, text in enumerate(given)]
    prompts = fields.get("prompts")
    if not isinstance(prompts, list) or len(prompts) not in (1, len(images)):
        raise ContractError(f"prompts must be a list of one prompt for all images, or of {len(images)}, one for each")
    read = [read_prompt(index, entry) for index, entry in enumerate(prompts)]
    return ScoreRequest(images, read if len(read) == len(images) else read * len(images))


def read_prompt(index: int, entry: object) -> Prompt:
    """A prompt of a request: its text, or an object with its text, target, negative and metadata."""
    given = {"text": entry} if isinstance(entry, str) else entry
    if not isinstance(given, dict) or not isinstance(given.get("text"), str):
        raise ContractError(f"prompts[{index}] must be a text, or an object with a text")
    if unknown := sorted(set(given) - {"text", "target", "negative", "metadata"}):
        raise ContractError(f"prompts[{index}] has text, target, negative and metadata; unknown: {unknown[0]!r:.40}")
    target, negative = (given.get(name) for name in ("target", "negative"))
    metadata = given.get("metadata", {})
    if not (isinstance(target, str | None) and isinstance(negative, str | None) and isinstance(metadata, dict)):
        raise ContractError(f"prompts[{index}]: target and negative must be texts, metadata an object")
    return Prompt(index=index, text=given["text"], target=target, negative=negative, metadata=metadata)


def _from_base64(index: int, text: object) -> bytes:
    if not isinstance(text, str):
        raise ContractError(f"images[{index}] must be the base64 of a PNG or JPEG file, got {type(text).__name__}")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ContractError(f"images[{index}] is not base64: {error}") from error


def reply_body(reply: ScoreReply) -> bytes:
    """The JSON reply."""
    extras = {"extras": [dict(extra) for extra in reply.extras]} if reply.extras else {}
    return dumps({"version": VERSION, "scores": list(reply.scores), **extras})


def read_reply(body: bytes, count: int) -> ScoreReply:
    """The reply to a request of `count` images. Raises ContractError."""
    fields = loads(body, "the reply")
    if (version := fields.get("version")) != VERSION:
        raise ContractError(f"the reply's version must be {VERSION}, got {version!r:.20}: {shown(body)}")
    return ScoreReply(read_scores(fields.get("scores"), count), read_extras(fields.get("extras"), count))


def read_scores(scores: object, count: int) -> tuple[float, ...]:
    """`count` finite numbers, in a list. Raises ContractError."""
    if not isinstance(scores, list) or len(scores) != count:
        got = f"{len(scores)} of them" if isinstance(scores, list) else type(scores).__name__
        raise ContractError(f"the reply must hold a list of {count} scores, got {got}")
    for index, score in enumerate(scores):
        if not is_number(score):
            raise ContractError(f"scores[{index}] of the reply must be a finite number, got {score!r:.40}")
    return tuple(float(score) for score in scores)


def is_number(value: object) -> bool:
    """Whether it is a finite number that a float can hold; JSON has integers of any length."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def read_extras(extras: object, count: int) -> tuple[Mapping[str, float | str], ...]:
    """`count` objects of finite numbers and texts by name, or none at all. Raises ContractError."""
    if extras is None:
        return ()
    if not isinstance(extras, list) or len(extras) != count or not all(isinstance(extra, dict) for extra in extras):
        raise ContractError(f"extras of the reply must be a list of {count} objects")
    for index, extra in enumerate(extras):
        for name, value in extra.items():
            if name == "score" or not (is_number(value) or isinstance(value, str)):
                raise ContractError(
                    f"extras[{index}] of the reply has numbers and texts, got {name!r:.40}: {value!r:.40}"
                )
    return tuple(extras)
