"""A row of a prompt file → Prompt, and what is refused; each refusal names the file and the line or row."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from async_flowrl.config.messages import unknown_name
from async_flowrl.config.resolution import parse_resolution
from async_flowrl.data.messages import PromptError, content_of, split_messages
from async_flowrl.types import Prompt, Resolution, TokenIds

QUOTED = re.compile(r'"([^"]*)"|“([^”]*)”')
"""The first pair of double quotes, straight or curly, holds what should be written in the image."""
UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters but tab and line ends, and halves of UTF-16 pairs, which no encoding has."""
MAX_CHARACTERS = 32_768
"""A longer prompt is refused: text encoders read a few thousand characters at most."""
MAX_WEIGHT = 1e100
"""Of a prompt: a million of these still have a sum."""
SIZES = ("resolution", "height", "width")
COLUMNS = ("negative_prompt", "system_prompt", "target", "prompt_token_ids", "negative_token_ids", *SIZES)
"""Columns with a meaning of their own; all others travel to the reward as metadata."""

_ENCODER = json.JSONEncoder(sort_keys=True, ensure_ascii=False, default=str)


@dataclass(frozen=True)
class Keys:
    """How a row is read: its columns, and whether the reward needs a target."""

    prompt: str = "prompt"
    weight: str | None = None
    needs_target: bool = False


def read_prompt(index: int, where: str, columns: Mapping[str, Any], keys: Keys) -> Prompt:
    """Raises PromptError, naming `where`, for a row that holds no prompt that can be trained on."""
    if keys.prompt not in columns:
        raise PromptError(f"{where}: {unknown_name('data.prompt_key', keys.prompt, columns)}")
    written, system = split_messages(columns[keys.prompt], where)
    text = written.strip()
    if not text:
        raise PromptError(f"{where}: the prompt is empty")
    target = _optional(columns, "target", where) or _ground_truth(columns) or quoted_target(text)
    if keys.needs_target and not target:
        raise PromptError(f"{where}: {no_target(text)}")
    negative = _optional(columns, "negative_prompt", where)
    # An empty system prompt is none: verl-omni writes one for models that have no place for it.
    system = _optional(columns, "system_prompt", where) or system or None
    for name, value in (("prompt", written), ("negative", negative), ("system", system), ("target", target)):
        if value is not None:
            _check_text(f"{where}: the {name}{'' if name in ('prompt', 'target') else ' prompt'}", value)
    own = (keys.prompt, keys.weight, *COLUMNS)
    return Prompt(
        index=index,
        text=text,
        negative=negative,
        system=system,
        target=target,
        metadata={name: value for name, value in columns.items() if name not in own} if len(columns) > 1 else {},
        token_ids=_token_ids(columns, "prompt_token_ids", where),
        negative_token_ids=_token_ids(columns, "negative_token_ids", where),
        resolution=_resolution(columns, where),
    )


def read_weight(where: str, columns: Mapping[str, Any], key: str) -> float:
    """The weight of a row. Raises PromptError unless it is a number from 0 to MAX_WEIGHT."""
    if key not in columns:
        raise PromptError(f"{where}: {unknown_name('data.weight_key', key, columns)}")
    value = columns[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_WEIGHT:
        raise PromptError(f"{where}: {key}, its weight, must be a number from 0 to {MAX_WEIGHT:g}, got {value!r:.80}")
    return float(value)


def no_target(text: str) -> str:
    """What is said of a prompt without the target that a reward needs."""
    return f"the reward needs a target, but there is none in double quotes: {text!r:.200}"


def quoted_target(text: str) -> str | None:
    """What stands in the first pair of double quotes, without surrounding blanks; None if there is nothing."""
    if '"' not in text and "“" not in text:
        return None
    match = QUOTED.search(text)
    return ((match[1] or match[2] or "").strip() or None) if match else None


def digest(prompt: Prompt, weight: float | None = None) -> bytes:
    """16 bytes of everything that a prompt says and how often it is drawn; its place in the file is not in it."""
    hashed = hashlib.blake2b(prompt.text.encode(), digest_size=16)
    said = [prompt.negative, prompt.system, prompt.target, prompt.token_ids, prompt.negative_token_ids, weight]
    said += [] if prompt.resolution is None else [prompt.resolution]
    if prompt.metadata or any(value is not None for value in said):
        # No text contains the zero byte that ends this one.
        hashed.update(b"\0" + _ENCODER.encode((*said, prompt.metadata)).encode(errors="replace"))
    return hashed.digest()


def text_key(text: str) -> int:
    """64 bits of a prompt's text: equal for duplicates, whatever their other columns say."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def digest_all(digests: Iterable[bytes]) -> str:
    """One digest of many prompts in their order."""
    hashed = hashlib.blake2b(digest_size=16)
    for each in digests:
        hashed.update(each)
    return hashed.hexdigest()


def _check_text(what: str, text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise PromptError(f"{what} has {len(text):,} characters, {MAX_CHARACTERS:,} are allowed: {text[:40]!r}…")
    if match := UNPRINTABLE.search(text):
        place = f"U+{ord(match[0]):04X} at character {match.start() + 1}"
        raise PromptError(f"{what} holds a character that cannot be printed, {place}: {text[:80]!r}")


def _optional(columns: Mapping[str, Any], name: str, where: str) -> str | None:
    value = columns.get(name)
    return None if value is None else content_of(value, f"{where}: {name}")


def _token_ids(columns: Mapping[str, Any], name: str, where: str) -> TokenIds | None:
    """The ids that a tokenizer made of the prompt in the model's template; an integer is never a bool here."""
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
    """The size that a prompt's images have: of the column `resolution`, or of `height` and `width`."""
    given = {name: columns[name] for name in SIZES if columns.get(name) is not None}
    if not given:
        return None
    if len(given) != (1 if "resolution" in given else 2):
        names = " and ".join(given)
        raise PromptError(f"{where}: the size of images is in resolution, or in height and width, got {names}")
    try:
        return parse_resolution(given["resolution"] if "resolution" in given else [given["height"], given["width"]])
    except ValueError as error:
        raise PromptError(f"{where}: {' and '.join(given)} must be {error}") from error


def _ground_truth(columns: Mapping[str, Any]) -> str | None:
    """verl keeps the target in reward_model.ground_truth."""
    model = columns.get("reward_model")
    truth = model.get("ground_truth") if isinstance(model, Mapping) else None
    return truth if isinstance(truth, str) and truth.strip() else None
