"""Conversion of a row of a prompt file to a Prompt; an error names the file and the line or row.

Columns with text may hold a list of chat messages (role and content) in its place, as in verl's files.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_flowrl.config.error_text import unknown_name
from async_flowrl.config.resolution import Resolution, height_width, parse_resolution
from async_flowrl.data import condition_images
from async_flowrl.data.condition_images import read_images
from async_flowrl.types import ConditionImage, Prompt, TokenIds

# The first pair of double quotes, straight or curly, encloses the text that the image should show.
QUOTED = re.compile(r'"([^"]*)"|“([^”]*)”')
# Control characters except tab, line feed and carriage return, and surrogates, which cannot be encoded.
UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
# Text encoders read a few thousand characters at most.
MAX_CHARACTERS = 32_768
# The sum of a million such weights is still finite.
MAX_WEIGHT = 1e100
SIZES = ("resolution", "height", "width", "frames")
# Columns with a meaning of their own; all others are metadata for the reward.
COLUMNS = ("negative_prompt", "system_prompt", "target", "prompt_token_ids", "negative_token_ids", *SIZES)
# The places of images in verl-omni's texts, which stand before all else; encoders put their own there.
_PICTURES = re.compile(r"^\s*((?:Picture \d+:\s*)?<image>\s*)*")

_ENCODER = json.JSONEncoder(sort_keys=True, ensure_ascii=False, default=str)


class PromptError(ValueError):
    """A prompt file that cannot be used; the message names the file, and the line or row if there is one."""


@dataclass(frozen=True)
class Keys:
    """The columns of the prompt and of its weight (None: no weights), whether every prompt needs a target, and whether
    the columns `image` and `images` are read."""

    prompt: str = "prompt"
    weight: str | None = None
    needs_target: bool = False
    images: bool = True


def read_prompt(index: int, where: str, columns: Mapping[str, Any], keys: Keys, *, folder: Path = Path()) -> Prompt:
    """Returns the prompt of a row; `where` names the row in errors. Raises PromptError if it holds no usable prompt.

    `folder` is that of the file, from which the paths of images are looked up.
    """
    if keys.prompt not in columns:
        raise PromptError(
            f"{where}: it has no {keys.prompt!r} (data.prompt_key), but {', '.join(columns) or 'nothing'}"
        )
    images = _images(columns, where, keys, folder)
    written, system = split_messages(columns[keys.prompt], where, images=bool(images))
    negative = _optional(columns, "negative_prompt", where, images=bool(images))
    if images:
        written = _without_places(written, len(images), where)
        negative = None if negative is None else _without_places(negative, len(images), where)
    text = written.strip()
    if not text:
        raise PromptError(f"{where}: the prompt is empty")
    target = _optional(columns, "target", where) or _ground_truth(columns) or quoted_target(text)
    if keys.needs_target and not target:
        raise PromptError(f"{where}: {no_target(text)}")
    # An empty system prompt counts as none: verl-omni writes one for models that take none.
    system = _optional(columns, "system_prompt", where) or system or None
    for name, value in (("prompt", written), ("negative", negative), ("system", system), ("target", target)):
        if value is not None:
            _check_text(f"{where}: the {name}{'' if name in ('prompt', 'target') else ' prompt'}", value)
    fields = (keys.prompt, keys.weight, *COLUMNS, *(condition_images.COLUMNS if keys.images else ()))
    return Prompt(
        index=index,
        text=text,
        negative=negative,
        system=system,
        target=target,
        metadata={name: value for name, value in columns.items() if name not in fields} if len(columns) > 1 else {},
        token_ids=_token_ids(columns, "prompt_token_ids", where),
        negative_token_ids=_token_ids(columns, "negative_token_ids", where),
        resolution=_resolution(columns, where),
        images=images,
    )


def read_weight(where: str, columns: Mapping[str, Any], key: str) -> float:
    """Returns the weight of a row. Raises PromptError unless it is a number from 0 to MAX_WEIGHT."""
    if key not in columns:
        raise PromptError(f"{where}: {unknown_name('data.weight_key', key, columns)}")
    value = columns[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_WEIGHT:
        raise PromptError(f"{where}: {key}, its weight, must be a number from 0 to {MAX_WEIGHT:g}, got {value!r:.80}")
    return float(value)


def split_messages(value: Any, where: str, *, images: bool = False) -> tuple[str, str | None]:
    """Returns (text, system prompt or None) of text, or of one user message and at most one system message.

    With `images`, which the row has, their places in a message are left out. Raises PromptError, which names `where`,
    for anything else.
    """
    if isinstance(value, str):
        return value, None
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise PromptError(f"{where}: expected text or a list of messages, got {type(value).__name__} {value!r:.200}")
    roles = [message.get("role") for message in value]
    if sorted(map(str, roles)) not in (["user"], ["system", "user"]):
        raise PromptError(f"{where}: expected one user message and at most one system message, got roles {roles}")
    by_role = {message["role"]: _content(message.get("content"), where, images) for message in value}
    return by_role["user"], by_role.get("system")


def no_target(text: str) -> str:
    return f"the reward needs a target, but there is none in double quotes: {text!r:.200}"


def quoted_target(text: str) -> str | None:
    """Returns the text in the first pair of double quotes without surrounding white space; None if there is none."""
    if '"' not in text and "“" not in text:
        return None
    match = QUOTED.search(text)
    return ((match[1] or match[2] or "").strip() or None) if match else None


def digest(prompt: Prompt, weight: float | None = None) -> bytes:
    """Returns a 16-byte hash of the prompt's contents and its weight; its position in the file is not included."""
    hashed = hashlib.blake2b(prompt.text.encode(), digest_size=16)
    parts: list[Any] = [
        prompt.negative,
        prompt.system,
        prompt.target,
        prompt.token_ids,
        prompt.negative_token_ids,
        weight,
    ]
    parts += [] if prompt.resolution is None else [prompt.resolution]
    parts += [tuple(image.sha256 for image in prompt.images)] if prompt.images else []
    if prompt.metadata or any(part is not None for part in parts):
        # No text contains a zero byte, so it separates the text from the rest.
        hashed.update(b"\0" + _ENCODER.encode((*parts, prompt.metadata)).encode(errors="replace"))
    return hashed.digest()


def text_key(prompt: Prompt) -> int:
    """Returns a 64-bit hash of a prompt's text and images; duplicates of both have the same one."""
    words = "\0".join((prompt.text, *(image.sha256 for image in prompt.images)))
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little")


def _images(columns: Mapping[str, Any], where: str, keys: Keys, folder: Path) -> tuple[ConditionImage, ...]:
    try:
        return read_images(columns, folder) if keys.images else ()
    except ValueError as error:
        raise PromptError(f"{where}: {error}") from error


def _without_places(text: str, images: int, where: str) -> str:
    """Returns the text without the `<image>` of each of its images. Raises PromptError for another number of them."""
    found = text.count("<image>")
    rest = _PICTURES.sub("", text, count=1) if found else text
    if found not in (0, images) or "<image>" in rest:
        counts = f"{images} images, and {found} times <image>"
        raise PromptError(f"{where}: {counts}: there must be as many, before the text, or none, got {text!r:.200}")
    return rest


def _check_text(what: str, text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise PromptError(f"{what} has {len(text):,} characters, {MAX_CHARACTERS:,} are allowed: {text[:40]!r}…")
    # Python tells a text without any such character several times faster; one with line feeds is searched for others.
    if not text.isprintable() and (match := UNPRINTABLE.search(text)):
        place = f"U+{ord(match[0]):04X} at character {match.start() + 1}"
        raise PromptError(f"{what} holds a character that cannot be printed, {place}: {text[:80]!r}")


def _optional(columns: Mapping[str, Any], name: str, where: str, *, images: bool = False) -> str | None:
    value = columns.get(name)
    return None if value is None else split_messages(value, f"{where}: {name}", images=images)[0]


def _token_ids(columns: Mapping[str, Any], name: str, where: str) -> TokenIds | None:
    value = columns.get(name)
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise PromptError(f"{where}: {name} must be a list of at least one token id, got {value!r:.80}")
    for index, number in enumerate(value):
        if type(number) is not int or number < 0:
            raise PromptError(f"{where}: {name} must hold integers from 0 on, got {number!r} at position {index}")
    return tuple(value)


def _resolution(columns: Mapping[str, Any], where: str) -> Resolution | None:
    values = {name: columns[name] for name in SIZES if columns.get(name) is not None}
    if not values:
        return None
    frames = values.pop("frames", None)
    names = " and ".join(values)
    if names not in ("resolution", "height and width"):
        given = ", ".join(name for name in SIZES if columns.get(name) is not None)
        forms = "in resolution, or in height and width, of a video in frames, too"
        raise PromptError(f"{where}: the size of images is {forms}, got {given}")
    sides = values["resolution"] if "resolution" in values else list(values.values())
    try:
        size = parse_resolution(sides)
        return size if frames is None else parse_resolution([frames, *height_width(size)])
    except ValueError as error:
        raise PromptError(f"{where}: {names if frames is None else f'{names}, and frames,'} must be {error}") from error


def _ground_truth(columns: Mapping[str, Any]) -> str | None:
    model = columns.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, Mapping) else None
    return truth if isinstance(truth, str) and truth.strip() else None


def _content(content: Any, where: str, images: bool) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        if images:
            content = [part for part in content if not (isinstance(part, dict) and part.get("type") == "image")]
        parts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(content):
            return "".join(texts)
    raise PromptError(f"{where}: only text messages can be used, got {content!r:.200}")
