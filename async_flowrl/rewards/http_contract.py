"""The HTTP contract of reward servers: the content of requests and replies, and the encoding of images.

docs/rewards/http.md describes the contract. This module imports nothing heavy, because servers with an environment of
their own use it too.
"""

import base64
import binascii
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
from PIL import Image

from async_flowrl.config.error_text import shortened
from async_flowrl.rewards.call import Result
from async_flowrl.types import ByteArray, Prompt

# Version of requests of images, and of all replies; of requests of videos; and of both with the images they edit.
VERSION, VIDEO_VERSION, EDIT_VERSION = 1, 2, 3
PATH, HEALTH = "/v1/score", "/health"
# png is lossless; jpeg is smaller but changes the pixels that are scored.
FORMATS = ("png", "jpeg")
JPEG_QUALITY = 95
# Most characters of an unusable reply that an error message quotes.
SHOWN_CHARACTERS = 200


class ContractError(ValueError):
    """A request or a reply breaks the contract; the message is one sentence."""


class TooMuch(ContractError):
    """A request exceeds the server's limits."""


@dataclass(frozen=True)
class Limits:
    """Largest request that a server accepts; sizes, in pixels of one image and of all, are checked before decoding.

    `waiting` is the number of requests that may wait, `all_bytes` the size of all requests together.
    """

    body_bytes: int = 256 * 2**20
    images: int = 256
    pixels: int = 4096 * 4096
    all_pixels: int = 256 * 1024 * 1024
    waiting: int = 16
    all_bytes: int = 1024 * 2**20


class ScoreRequest(NamedTuple):
    """Encoded images and one prompt for each of them; or, unless `frames` is None, of each `frames`, a video.

    `sources`, empty without any, says how many of the last images each prompt of the request edits, in order; it has
    one number where one prompt stands for all.
    """

    images: Sequence[bytes]
    prompts: Sequence[Prompt]
    frames: int | None = None
    sources: Sequence[int] = ()


def encode_image(image: ByteArray, kind: str) -> bytes:
    """Encodes an image uint8 [H, W, 3] as a PNG or JPEG file. PNG uses fast, weak compression."""
    file = io.BytesIO()
    options: dict[str, Any] = {"compress_level": 1} if kind == "png" else {"quality": JPEG_QUALITY}
    Image.fromarray(np.ascontiguousarray(image)).save(file, format=kind, **options)
    return file.getvalue()


def decode_images(images: Sequence[bytes], limits: Limits) -> list[ByteArray]:
    """Decodes files to images uint8 [H, W, 3]. All sizes in the file headers are checked before any image is decoded.

    Raises TooMuch if the images are too large, and ContractError for anything else that is wrong with them.
    """
    opened, pixels = [], 0
    for index, data in enumerate(images):
        image = _open(index, data)
        if image.mode.startswith(("I", "F")):
            raise ContractError(f"image {index} has more than 8 bits per channel ({image.mode}), which are not scored")
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
    """Returns text, target, negative and metadata of a prompt for JSON. Raises ValueError if JSON cannot hold them."""
    optional = {"target": prompt.target, "negative": prompt.negative, "metadata": dict(prompt.metadata)}
    fields = {"text": prompt.text, **{name: value for name, value in optional.items() if value}}
    try:
        json.dumps(fields, default=_plain, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the metadata of prompt {prompt.text!r:.80} cannot be written as JSON: {error}") from error
    return fields


def _plain(value: object) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")


def dumps(value: Mapping[str, Any]) -> bytes:
    """Returns UTF-8 JSON; floats are written so that reading them gives the same bits."""
    return json.dumps(value, default=_plain, allow_nan=False, ensure_ascii=False).encode()


def loads(body: bytes, what: str) -> dict[str, Any]:
    """Parses a JSON object. Raises ContractError, whose message begins with `what` (for example "the reply")."""
    try:
        value = json.loads(body, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise ContractError(f"{what} is not JSON ({error}): {shown(body)}") from error
    if not isinstance(value, dict):
        raise ContractError(f"{what} must be a JSON object, got {type(value).__name__}")
    return value


def no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def shown(body: bytes) -> str:
    return repr(shortened(" ".join(body[: 4 * SHOWN_CHARACTERS].decode("utf-8", "replace").split()), SHOWN_CHARACTERS))


def request_body(images: Sequence[bytes], prompts: Sequence[Mapping[str, Any]], frames: int | None = None) -> bytes:
    """Returns the JSON request; `prompts` holds one prompt for all images (videos of `frames` images), or for each."""
    encoded = [base64.b64encode(image).decode() for image in images]
    return dumps(request_fields(prompts, frames) | {"images": encoded})


def request_fields(prompts: Sequence[Mapping[str, Any]], frames: int | None = None) -> dict[str, Any]:
    """Returns the fields of a request without its images; `frames` is None for images, else those of each video."""
    edits = any("sources" in prompt for prompt in prompts)
    version = EDIT_VERSION if edits else VERSION if frames is None else VIDEO_VERSION
    return {"version": version, **({} if frames is None else {"frames": frames}), "prompts": list(prompts)}


def read_request(fields: Mapping[str, Any], files: Sequence[bytes] | None, limits: Limits) -> ScoreRequest:
    """Reads a request from its JSON `fields`; `files` are the images of a multipart request, None for plain JSON.

    Raises ContractError, or TooMuch for too many images.
    """
    if (version := fields.get("version")) not in (VERSION, VIDEO_VERSION, EDIT_VERSION):
        known = f"{VERSION}, {VIDEO_VERSION} of videos, or {EDIT_VERSION} of edits"
        raise ContractError(f"version must be {known}, got {version!r:.20}")
    names = ("version", "prompts") if files is not None else ("version", "images", "prompts")
    names = (*names, "frames") if version != VERSION else names
    if unknown := sorted(set(fields) - set(names)):
        raise ContractError(f"the request has {', '.join(names)}; unknown: {', '.join(unknown)[:80]}")
    encoded = files if files is not None else fields.get("images")
    if not isinstance(encoded, list | tuple) or not encoded:
        raise ContractError("images must be a list of at least one image")
    if len(encoded) > limits.images:
        raise TooMuch(f"{len(encoded)} images are more than {limits.images}")
    images = list(files) if files is not None else [_from_base64(index, text) for index, text in enumerate(encoded)]
    prompts, frames = fields.get("prompts"), fields.get("frames", 1)
    sources = _counts(prompts) if version == EDIT_VERSION else []
    made = len(images) - sum(sources)
    if made < 1:
        raise ContractError(
            f"sources of the prompts are {sum(sources)} images, which leaves none of {len(images)} to score"
        )
    if not isinstance(frames, int) or isinstance(frames, bool) or frames < 1 or made % frames:
        raise ContractError(f"frames must be an integer that divides the {made} images to score, got {frames!r:.20}")
    scored = made // frames
    if not isinstance(prompts, list) or len(prompts) not in (1, scored):
        raise ContractError(f"prompts must be a list of one prompt for all images, or of {scored}, one for each")
    if sources:
        prompts = [{name: value for name, value in entry.items() if name != "sources"} for entry in prompts]
    read = [read_prompt(index, entry) for index, entry in enumerate(prompts)]
    of_videos = frames if version == VIDEO_VERSION or "frames" in fields else None
    return ScoreRequest(images, read if len(read) == scored else read * scored, of_videos, sources)


def _counts(prompts: object) -> list[int]:
    """Returns how many images each prompt of a request edits. Raises ContractError unless all edit one or more."""
    entries = prompts if isinstance(prompts, list) else []
    counts = [entry.get("sources") if isinstance(entry, dict) else None for entry in entries]
    for index, number in enumerate(counts):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ContractError(f"prompts[{index}] must have sources, the number of its images, got {number!r:.20}")
    return cast("list[int]", counts)


def read_prompt(index: int, entry: object) -> Prompt:
    """Reads a prompt: a text, or an object with text, target, negative and metadata. Raises ContractError."""
    fields = {"text": entry} if isinstance(entry, str) else entry
    if not isinstance(fields, dict) or not isinstance(fields.get("text"), str):
        raise ContractError(f"prompts[{index}] must be a text, or an object with a text")
    if unknown := sorted(set(fields) - {"text", "target", "negative", "metadata"}):
        raise ContractError(f"prompts[{index}] has text, target, negative and metadata; unknown: {unknown[0]!r:.40}")
    target, negative, metadata = fields.get("target"), fields.get("negative"), fields.get("metadata", {})
    if not (isinstance(target, str | None) and isinstance(negative, str | None) and isinstance(metadata, dict)):
        raise ContractError(f"prompts[{index}]: target and negative must be texts, metadata an object")
    return Prompt(index=index, text=fields["text"], target=target, negative=negative, metadata=metadata)


def _from_base64(index: int, text: object) -> bytes:
    if not isinstance(text, str):
        raise ContractError(f"images[{index}] must be the base64 of a PNG or JPEG file, got {type(text).__name__}")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ContractError(f"images[{index}] is not base64: {error}") from error


def reply_body(results: Sequence[Result]) -> bytes:
    scores = [score for result in results for score in result.scores]
    extras = [
        {name: values[image] for name, values in result.extras.items()}
        for result in results
        for image in range(len(result.scores))
    ]
    return dumps({"version": VERSION, "scores": scores} | ({"extras": extras} if any(extras) else {}))


def read_reply(body: bytes, count: int) -> list[Any]:
    """Returns a result per image: its score, or a mapping with the score and extras. Raises ContractError.

    What a score and an extra may be is checked as for every reward (`group_result` in call.py).
    """
    fields = loads(body, "the reply")
    if (version := fields.get("version")) != VERSION:
        raise ContractError(f"the reply's version must be {VERSION}, got {version!r:.20}: {shown(body)}")
    scores: Any = fields.get("scores")
    extras: Any = [{}] * count if fields.get("extras") is None else fields["extras"]
    for name, values in (("scores", scores), ("extras", extras)):
        if not isinstance(values, list) or len(values) != count:
            got = f"{len(values)} of them" if isinstance(values, list) else type(values).__name__
            raise ContractError(f"the reply must hold a list of {count} {name}, got {got}: {shown(body)}")
    if not all(isinstance(extra, dict) for extra in extras):
        raise ContractError(f"extras of the reply must be objects: {shown(body)}")
    return [extra | {"score": score} if extra else score for score, extra in zip(scores, extras, strict=True)]


def is_number(value: object) -> bool:
    """Returns True for a finite number that fits into a float; JSON integers can be larger."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False
