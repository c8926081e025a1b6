"""The reward `vlm_judge`: scores by a vision-language model at an OpenAI-compatible endpoint (vLLM, OpenAI, ...).

It asks one question per image, or one per group, and reads a number from the answer in one of four ways (`mode`).
docs/rewards/vlm_judge.md has all options, the scales, the costs and the ways in which a policy can exploit a judge.
An unreadable reply raises JudgeError instead of scoring 0, because a broken judge must not look like a bad image.
"""

import asyncio
import base64
import errno
import functools
import hashlib
import itertools
import json
import logging
import math
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple, cast

import numpy as np
from PIL import Image

from async_flowrl.config.error_text import shortened, unknown_name
from async_flowrl.config.paths import expanded
from async_flowrl.config.resolution import spaced_frames
from async_flowrl.rewards.endpoint import LIMITS, Endpoint, ServerError, check_numbers, checked_urls
from async_flowrl.rewards.http_contract import (
    SHOWN_CHARACTERS,
    ContractError,
    dumps,
    encode_image,
    is_number,
    loads,
    no_constant,
)
from async_flowrl.rewards.ocr import check_target, normalise, text_score
from async_flowrl.types import ByteArray, Prompt, Requests

logger = logging.getLogger(__name__)

SCORE, TRANSCRIBE, PROBABILITIES, EDIT = "score", "transcribe", "probabilities", "edit"
# Mode → default question; the names in braces are replaced (PLACEHOLDERS).
TEMPLATES = {
    SCORE: "The image was made for this prompt:\n{prompt}\n\nHow well does it show what the prompt asks for? "
    'Answer with JSON only, {"score": NUMBER}, from {min} (not at all) to {max} (perfectly).',
    TRANSCRIBE: "Write down all the text that this image shows, and nothing else.",
    PROBABILITIES: "The image was made for this prompt:\n{prompt}\n\nDoes it show what the prompt asks for? "
    "Answer with one of: {answers}.",
    # The rubric of EditScore (arXiv 2509.23909, appendix M), which asks for the third number in a request of its own.
    EDIT: "The last of these {count} images is an edit of those before it, by this instruction:\n{prompt}\n\nGive "
    "three numbers from {min} to {max}. First, success: {min} if the last image does not follow the instruction at "
    "all, {max} if it follows it perfectly. Second, restraint: {min} if it is completely different from the original, "
    "{max} if nothing has changed but what the instruction asks for. Third, quality: {min} if it looks unnatural or is "
    'full of artefacts, {max} if it looks natural. Answer with JSON only, {"scores": [success, restraint, quality]}.',
}
# What the numbers are called beside the score.
OF_EDIT = ("success", "restraint", "quality")
GROUP_TEMPLATE = (
    "These {count} images were made for one prompt:\n{prompt}\n\nHow well does each show what the prompt asks for? "
    'Answer with JSON only, {"scores": [NUMBER, ...]}, one number per image in their order, from {min} (not at all) to '
    "{max} (perfectly)."
)
# Part of these templates → what stands there where the images are frames of a video.
OF_VIDEOS = {
    "The image was made": "These {count} images are frames, in their order, of a video that was made",
    "this image shows": "this video shows, of which these {count} images are frames",
}
# The same where the images before the last one are those that were edited.
OF_EDITS = {
    "The image was made": "The last of these {count} images was made from those before it,",
    "this image shows": "the last of these {count} images shows",
}
# Mode → default limit of the tokens of an answer.
MAX_TOKENS = {SCORE: 256, TRANSCRIBE: 512, PROBABILITIES: 4, EDIT: 256}
ONE_BY_ONE, GROUP = "one_by_one", "group"
PLACEHOLDERS = ("prompt", "target", "min", "max", "answers", "count")
MAX_REPLY_BYTES = 4 * 2**20
# Limit of OpenAI, and of vLLM unless it is started with another one.
MAX_TOP_LOGPROBS = 20
# Numeric options besides LIMITS, as in LIMITS.
NUMBERS = (
    ("temperature", 0.0, 2.0),
    ("min_mass", 0.0, 1.0),
    ("max_tokens", 1, math.inf),
    ("top_logprobs", 1, MAX_TOP_LOGPROBS),
    ("frames", 1, math.inf),
)
# Tolerance above 0 for log-probabilities, because servers round them.
LOGPROB_ROUNDING = 1e-3
# A number after a marker, also inside Markdown's asterisks; no part of 4,5 or 1,000 or 7-8 or 4.5/5.
_NUMBER = re.compile(r"[\s*_:]*(-?\d+(?:\.\d+)?)(?![\d.,]*\d|[ *_]*[-–/][ *_]*\d)")
_FENCE = re.compile(r"\A```(?:json)?\s*\n(.*)\n\s*```\Z", re.DOTALL)
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")


# One image's score under `score`, and the extras that are logged beside it.
Verdict = dict[str, float | str]


@dataclass(frozen=True, eq=False)
class Picture:
    """An image uint8 [H, W, 3] of questions, which may be in several."""

    pixels: ByteArray

    @functools.cached_property
    def digest(self) -> str:
        return hashlib.sha256(repr(self.pixels.shape).encode() + self.pixels.tobytes()).hexdigest()

    @functools.cached_property
    def url(self) -> str:
        return "data:image/png;base64," + base64.b64encode(encode_image(self.pixels, "png")).decode()


class JudgeError(ContractError):
    """A judge's answer without a usable score; the message is one sentence."""


class Answer(NamedTuple):
    """The part of a reply that is used and stored.

    `cut`: the text ended at max_tokens. `first` holds the likeliest first tokens with their natural log-probabilities;
    it is empty if the server sends none.
    """

    text: str
    cut: bool
    first: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, content: bytes) -> "Answer":
        """Reads the body of a reply. Raises ContractError if it is not a finished chat completion."""
        reply = loads(content, "the reply")
        try:
            choice = reply["choices"][0]
            message, reason = choice["message"], choice.get("finish_reason")
            text = message.get("content")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise JudgeError(f"the reply is no chat completion: {_short(reply)}") from error
        if reason not in ("stop", "length"):
            raise JudgeError(f"the judge ended with finish_reason {reason!r}: {_short(message)}")
        if not isinstance(text, str):
            raise JudgeError(f"the judge gave no text: {_short(message)}")
        return cls(text, reason == "length", _first_tokens(choice.get("logprobs")))


def _first_tokens(logprobs: Any) -> tuple[tuple[str, float], ...]:
    """Returns the alternatives at the first token that is not white space; empty without any. Raises JudgeError."""
    content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    try:
        for position in content or ():
            if position["token"].strip():
                return tuple(_alternative(top["token"], top["logprob"]) for top in position["top_logprobs"])
    except (KeyError, TypeError, AttributeError) as error:
        raise JudgeError(f"the reply's logprobs are not those of a chat completion: {_short(content)}") from error
    return ()


def _alternative(token: object, logprob: Any) -> tuple[str, float]:
    if not isinstance(token, str):
        raise TypeError(token)
    if logprob != -math.inf and not (is_number(logprob) and logprob <= LOGPROB_ROUNDING):
        raise JudgeError(f"the reply has {logprob!r} where a log-probability was due")
    return token, float(logprob)


class ReplyCache:
    """The judge's replies on disk by a hash of the question, so that no question is asked twice.

    An index of keys is in memory (about 200 bytes each). Each process appends JSON lines to a file of its own in the
    folder, which needs no locks; network file systems may lack them. A killed process leaves at most one unfinished
    line, which is ignored. If two files have the same key, the answer that was read first is used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._own = folder / f"{uuid.uuid4().hex}.jsonl"  # The file that this process appends to.
        self._file: BinaryIO | None = None
        self._places: dict[bytes, tuple[Path, int]] = {}  # Key → file, and where its line begins.
        self._read: dict[Path, int] = {}  # File of another process → number of its bytes that are in `_places`.

    def refresh(self) -> None:
        """Indexes lines that other processes have added. Raises ValueError, which names the file, for a damaged one."""
        for path in sorted(self.folder.glob("*.jsonl")):
            if path == self._own:
                continue
            start = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(start)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    try:
                        key = bytes.fromhex(json.loads(line)["key"])
                    except (ValueError, KeyError, TypeError) as error:
                        raise ValueError(f"{path}: byte {start} begins no kept reply; delete the file") from error
                    self._places.setdefault(key, (path, start))
                    start += len(line)
            self._read[path] = start

    def get(self, key: bytes) -> Answer | None:
        if key not in self._places:
            return None
        path, start = self._places[key]
        with path.open("rb") as file:
            file.seek(start)
            return Answer(**json.loads(file.readline())["answer"])

    def put(self, key: bytes, answer: Answer) -> None:
        """Appends an answer to this process's file; `sync` makes it durable. Raises OSError if it cannot be written."""
        if self._file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = self._own.open("ab", buffering=0)
        start = self._file.tell()
        line = json.dumps({"key": key.hex(), "answer": answer._asdict()}, allow_nan=False).encode() + b"\n"
        if self._file.write(line) != len(line):
            self._file.truncate(start)
            raise OSError(errno.ENOSPC, "no room for a judge's reply", str(self._own))
        self._places.setdefault(key, (self._own, start))

    def sync(self) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())


@dataclass(eq=False)
class VLMJudge:
    """Scores images by a judge's answers; an answer without a readable score raises an error and never counts as 0.

    With `video` it scores videos: a question has at most `frames` frames of one, evenly spaced.

    `mode`: `score` reads JSON with a number within `range`, scaled to 0 .. 1 by `normalise`, or the number after
    `after`; `transcribe` compares the text that the judge reads with `prompt.target`, as the reward `ocr` does;
    `probabilities` is the expected value of `answers` by their probabilities as first token, which together must reach
    `min_mass`; `edit` is sqrt(min(success, restraint) * quality) (EditScore, arXiv 2509.23909). With `sources` a
    question shows the images that the prompt edits before each image. docs/rewards/vlm_judge.md explains all options.
    """

    base_url: str | Sequence[str] | None = None
    model: str = ""
    mode: str = SCORE
    prompt_template: str | None = None
    system: str | None = None
    range: Sequence[float] = (0.0, 10.0)
    normalise: bool = True
    answers: Mapping[str, float] = field(default_factory=lambda: {"yes": 1.0, "no": 0.0})
    min_mass: float = 0.5
    images: str = ONE_BY_ONE
    structured: bool = True
    after: str | None = None
    temperature: float = 0.0
    seed: int | None = 0
    max_tokens: int | None = None
    top_logprobs: int = MAX_TOP_LOGPROBS
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    api_key_env: str | None = None
    version: str = ""
    timeout: float = 60.0
    deadline: float = 240.0
    retries: int = 4
    concurrency: int = 32
    cache: str | None = None
    video: bool = False
    sources: bool = False
    frames: int = 8

    deterministic: ClassVar[bool] = False
    # Option that is required unless the term has `serve`, and an example of its value.
    wants_server: ClassVar[tuple[str, str]] = ("base_url", "http://127.0.0.1:8000/v1")

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("the vlm_judge reward needs model, the name that the server has for it")
        _check_mode(self.mode, self.images, self.after)
        self._tokens = MAX_TOKENS[self.mode] if self.max_tokens is None else self.max_tokens
        check_numbers("vlm_judge", vars(self) | {"max_tokens": self._tokens}, (*LIMITS, *NUMBERS))
        self._group = self.images == GROUP
        if self._group and self.video:
            raise ValueError("the vlm_judge reward's video=true asks about one video at a time: leave images=group out")
        if self.sources and (self._group or self.video):
            raise ValueError("the vlm_judge reward's sources=true asks about one image: leave images and video out")
        if self.mode == EDIT and not self.sources:
            raise ValueError("the vlm_judge reward's mode=edit compares with what was edited: it needs sources=true")
        self._template = self.prompt_template or (GROUP_TEMPLATE if self._group else TEMPLATES[self.mode])
        if self.prompt_template is None:
            for of_image, of_these in ((self.video and OF_VIDEOS) or (self.sources and OF_EDITS) or {}).items():
                self._template = self._template.replace(of_image, of_these)
        self._needs_target = "target" in _placeholders(self._template, self.mode) or self.mode == TRANSCRIBE
        self._values, self._bounds = _answers(self.answers), _rising(self.range)
        self._endpoint = Endpoint(_urls(self.base_url), vars(self), reply_bytes=MAX_REPLY_BYTES, token="api_key_env")
        self._cache = None if self.cache is None else ReplyCache(expanded(self.cache))
        self._term = ""

    def for_term(self, name: str) -> None:
        """Makes kept replies those of the term `name` alone: another term may ask another server the same question."""
        self._term = name

    def check(self, prompt: Prompt) -> None:
        if self._needs_target:
            check_target(prompt, "mode=transcribe" if self.mode == TRANSCRIBE else "{target} in prompt_template")

    def counted(self) -> Requests:
        return self._endpoint.counted()

    def connect(self, urls: Sequence[str], token: str | None) -> None:
        """Replaces the URLs, to which `/v1` is added, and the token by those of servers that the run has started."""
        self._endpoint.connect(_urls([f"{url.rstrip('/')}/v1" for url in urls]), token)

    def keep_in(self, folder: Path) -> None:
        """Stores replies in `judge_cache` of the run directory `folder`, unless `cache` names another folder."""
        if self._cache is None:
            self._cache = ReplyCache(folder / "judge_cache")

    async def __call__(self, images: ByteArray, prompt: Prompt, sources: Sequence[ByteArray] = ()) -> list[Verdict]:
        """Returns score and extras per image. Raises ServerError once all calls have ended; good replies are kept."""
        self.check(prompt)
        before = [Picture(at_most(source, max(images.shape[1:3]))) for source in sources]
        shown = [images] if self._group else images[:, None]
        if self.video:
            shown = [video[spaced_frames(len(video), self.frames)] for video in images]
        calls = [[*before, *map(Picture, each)] for each in shown]
        keys = [self._key(prompt, call) for call in calls]
        distinct = dict(zip(keys, calls, strict=True))
        if self._cache is not None:
            await asyncio.to_thread(self._cache.refresh)
        judging = (self._judged(key, call, prompt) for key, call in distinct.items())
        results = dict(zip(distinct, await asyncio.gather(*judging, return_exceptions=True), strict=True))
        if self._cache is not None:
            await asyncio.to_thread(self._cache.sync)
        failures = [result for result in results.values() if isinstance(result, BaseException)]
        if failures and isinstance(failures[0], ServerError):
            raise ServerError(f"{failures[0]} ({len(failures)} of {len(results)} calls failed)") from failures[0]
        if failures:
            raise failures[0]
        return [verdict for key in keys for verdict in cast("list[Verdict]", results[key])]

    async def _judged(self, key: bytes, images: list[Picture], prompt: Prompt) -> list[Verdict]:
        kept = None if self._cache is None else self._cache.get(key)
        if kept is not None:
            return self._verdicts(kept, len(images) if self._group else 1, prompt, cached=True)
        body = dumps(self._body(prompt, [image.url for image in images]))

        def read(content: bytes) -> tuple[Answer, list[Verdict]]:
            answer = Answer.of(content)
            return answer, self._verdicts(answer, len(images) if self._group else 1, prompt, cached=False)

        answer, verdicts = await self._endpoint.post(body, "application/json", key[0], read)
        if self._cache is not None:
            try:
                self._cache.put(key, answer)
            except OSError as error:
                logger.warning("the judge's replies are no longer kept in %s: %s", self._cache.folder, error)
                self._cache = None
        return verdicts

    def _verdicts(self, answer: Answer, count: int, prompt: Prompt, *, cached: bool) -> list[Verdict]:
        extras: Verdict = {"text": answer.text, "cached": float(cached)}
        if self.mode == TRANSCRIBE:
            return [extras | {"score": _transcription_score(answer, prompt.target or ""), "cut": float(answer.cut)}]
        if self.mode == PROBABILITIES:
            score, probabilities = _expected_value(answer, self._values, min_mass=self.min_mass)
            by_name = {"p." + re.sub(r"[^\w.-]", "_", name): p for name, p in probabilities.items()}
            return [extras | {"score": score} | by_name]
        low, high = self._bounds
        if self.mode == EDIT:
            answered = _scores_in(answer, len(OF_EDIT), self._bounds, several=True)
            success, restraint, quality = shares = [(score - low) / (high - low) for score in answered]
            score = math.sqrt(min(success, restraint) * quality)
            own = dict(zip(OF_EDIT, shares, strict=True))
            return [extras | own | {"score": score if self.normalise else low + (high - low) * score}]
        if self.after is not None:
            scores = [_score_after(answer, self.after, self._bounds)]
        else:
            scores = _scores_in(answer, count, self._bounds, several=self._group)
        return [extras | {"score": (score - low) / (high - low) if self.normalise else score} for score in scores]

    def _body(self, prompt: Prompt, urls: Sequence[str]) -> dict[str, Any]:
        images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        question = {"type": "text", "text": self._filled(prompt, len(urls))}
        system = [{"role": "system", "content": self.system}] if self.system else []
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [*system, {"role": "user", "content": [*images, question]}],
            "temperature": self.temperature,
            "max_tokens": self._tokens,
            "seed": self.seed,
        }
        if self.mode == PROBABILITIES:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.mode in (SCORE, EDIT) and self.structured and self.after is None:
            body["response_format"] = self._format(len(urls))
        return {name: value for name, value in (body | dict(self.extra_body)).items() if value is not None}

    def _key(self, prompt: Prompt, images: Sequence[Picture]) -> bytes:
        """Returns a 32-byte hash that is equal for the same question of the same term about the same images."""
        body = self._body(prompt, [image.digest for image in images])
        question = json.dumps([self._term, self.version, body], sort_keys=True)
        return hashlib.sha256(question.encode()).digest()

    def _filled(self, prompt: Prompt, count: int) -> str:
        values = {
            "prompt": prompt.text,
            "target": prompt.target or "",
            "min": f"{self._bounds[0]:g}",
            "max": f"{self._bounds[1]:g}",
            "answers": ", ".join(self._values),
            "count": str(count),
        }
        return _PLACEHOLDER.sub(lambda match: values[match[1]], self._template)

    def _format(self, count: int) -> dict[str, Any]:
        number = {"type": "number", "minimum": self._bounds[0], "maximum": self._bounds[1]}
        count = len(OF_EDIT) if self.mode == EDIT else count
        several = {"type": "array", "items": number, "minItems": count, "maxItems": count}
        name, kind = ("scores", several) if self._group or self.mode == EDIT else ("score", number)
        schema = {"type": "object", "properties": {name: kind}, "required": [name], "additionalProperties": False}
        return {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}


def at_most(image: ByteArray, side: int) -> ByteArray:
    """Returns an image with its longer side reduced to `side` pixels, so that a question does not grow with it."""
    picture = Image.fromarray(image)
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    return np.asarray(picture)


def _urls(option: str | Sequence[str] | None) -> list[str]:
    what = "the vlm_judge reward's base_url"
    urls = checked_urls(what, option, "http://127.0.0.1:8000/v1", "api_key_env")
    for url in urls:
        if url.endswith("/chat/completions"):
            raise ValueError(f"{what} ends before /chat/completions, got {url!r}")
    return [f"{url}/chat/completions" for url in urls]


def _check_mode(mode: str, images: str, after: str | None) -> None:
    for key, value, allowed in (("mode", mode, tuple(TEMPLATES)), ("images", images, (ONE_BY_ONE, GROUP))):
        if value not in allowed:
            raise ValueError(unknown_name(f"the vlm_judge reward's {key}", str(value), allowed))
    if images == GROUP and mode != SCORE:
        raise ValueError(f"the vlm_judge reward's images=group needs mode=score, got mode={mode}")
    if after is not None and (not after.strip() or mode != SCORE or images == GROUP):
        raise ValueError(
            f"the vlm_judge reward's after is the text before the number in a free answer; it needs mode={SCORE} and "
            f"images={ONE_BY_ONE}, got {after!r} with mode={mode} and images={images}"
        )


def _placeholders(template: str, mode: str) -> set[str]:
    names = set(_PLACEHOLDER.findall(template))
    for name in sorted(names - set(PLACEHOLDERS)):
        raise ValueError(unknown_name("a name in braces in prompt_template", name, PLACEHOLDERS))
    if mode != TRANSCRIBE and not names & {"prompt", "target"}:
        raise ValueError(f"vlm_judge: prompt_template must contain {{prompt}} or {{target}}, got {template!r}")
    return names


def _rising(option: Sequence[float]) -> tuple[float, float]:
    if len(option) != 2 or not all(map(is_number, option)) or not option[0] < option[1]:
        raise ValueError(f"the vlm_judge reward's range must be two rising numbers, got {list(option)!r}")
    return float(option[0]), float(option[1])


def _answers(option: Mapping[Any, Any]) -> dict[str, float]:
    what = "the vlm_judge reward's answers"
    for name in option:
        if isinstance(name, bool):
            raise ValueError(f"{what} have {name} for a name: put yes and no in quotes")
    answers = {str(name).strip(): value for name, value in option.items()}
    if len(answers) < 2:
        raise ValueError(f"{what} must be two or more, got {dict(option)!r}")
    for name, value in answers.items():
        if not is_number(value):
            raise ValueError(f"{what} must have finite numbers, got {name!r}: {value!r}")
    for shorter, longer in itertools.pairwise(sorted(name.casefold() for name in answers)):
        if longer.startswith(shorter) or not shorter:
            raise ValueError(f"{what} {shorter!r} and {longer!r} begin alike, and only their first token is read")
    return {name: float(value) for name, value in answers.items()}


def _scores_in(answer: Answer, count: int, bounds: tuple[float, float], *, several: bool) -> list[float]:
    """Returns `count` numbers within `bounds`, read from JSON: {"scores": [...]} for several, else {"score": x} or x.

    Raises JudgeError otherwise, also for a bare number that was cut off: "1" may be the beginning of "10".
    """
    fenced = _FENCE.match(answer.text.strip())
    try:
        parsed = json.loads(fenced.group(1) if fenced else answer.text, parse_constant=no_constant)
    except (ValueError, RecursionError):
        cut = ", cut off at max_tokens" if answer.cut else ""
        text = answer.text.strip()
        around = "</think>" in text or ('"score"' in text and text[:1] + text[-1:] != "{}")
        hint = "; after='\"score\":' would read the number within other text" if around and not (cut or several) else ""
        raise JudgeError(f"the judge's answer is no JSON{cut}: {_short(answer.text)}{hint}") from None
    if answer.cut and not isinstance(parsed, dict | list):
        raise JudgeError(f"the judge's answer is a number cut off at max_tokens: {_short(answer.text)}")
    key = "scores" if several else "score"
    if isinstance(parsed, dict):
        if key not in parsed:
            raise JudgeError(f"the judge's answer has no {key!r}: {_short(answer.text)}")
        parsed = parsed[key]
    values = parsed if several else [parsed]
    if not isinstance(values, list) or len(values) != count:
        raise JudgeError(f"the judge was asked for {count} scores and answered {_short(answer.text)}")
    return [_bounded(value, bounds) for value in values]


def _score_after(answer: Answer, marker: str, bounds: tuple[float, float]) -> float:
    _, marked, rest = answer.text.rpartition(marker)
    number = _NUMBER.match(rest)
    if answer.cut or not marked or number is None:
        problem = "is cut off at max_tokens" if answer.cut else f"has no single number after {marker!r}"
        raise JudgeError(f"the judge's answer {problem}: {_short(answer.text[-SHOWN_CHARACTERS:])}")
    return _bounded(float(number[1]), bounds)


def _bounded(value: object, bounds: tuple[float, float]) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise JudgeError(f"the judge answered {value!r} where a number was due")
    low, high = bounds
    if not low <= value <= high:
        raise JudgeError(f"the judge answered {value!r}, outside of {low:g} .. {high:g}")
    return float(value)


def _transcription_score(answer: Answer, target: str) -> float:
    # A transcription that was cut off is scored if it has at least 2 n characters, since its edit distance cannot fall
    # below n any more; else JudgeError is raised.
    if answer.cut and len(normalise(answer.text)) < 2 * len(normalise(target)):
        raise JudgeError(f"the transcription is cut off at max_tokens: {_short(answer.text)}")
    return text_score(answer.text, target)


def _expected_value(answer: Answer, values: Mapping[str, float], *, min_mass: float) -> tuple[float, dict[str, float]]:
    """Returns the expected value of the listed answers, and each answer's probability among all tokens.

    Tokens are compared without case and white space, so " Yes" and "yes" are added up. Raises JudgeError if the server
    sends no log-probabilities, or if the listed answers together have less probability than `min_mass`.
    """
    if not answer.first:
        raise JudgeError("the server sends no log-probabilities (logprobs, top_logprobs): mode=score needs none")
    names = {name.casefold(): name for name in values}
    probabilities = dict.fromkeys(values, 0.0)
    for token, logprob in answer.first:
        if (name := names.get(token.strip().casefold())) is not None:
            probabilities[name] += math.exp(logprob)
    mass = sum(probabilities.values())
    if mass <= 0 or mass < min_mass:
        likely = ", ".join(repr(token) for token, _ in answer.first[:5])
        share = f"{mass:.3g} of the probability, less than min_mass={min_mass:g}"
        raise JudgeError(f"the listed answers hold {share}; the likeliest tokens are {likely}")
    return sum(probabilities[name] * value for name, value in values.items()) / mass, probabilities


def _short(value: object) -> str:
    return shortened(repr(value), SHOWN_CHARACTERS)
