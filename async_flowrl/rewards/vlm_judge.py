"""The reward `vlm_judge`: scores by a vision-language model at an OpenAI-compatible endpoint (vLLM, OpenAI, ...).

It asks one question per image, or one per group, and reads a number from the answer in one of three ways (`mode`).
docs/rewards/vlm_judge.md has all options, the scales, the costs and the ways in which a policy can exploit a judge.
"""

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from async_flowrl.rewards import vlm_judge_checks as checks
from async_flowrl.rewards.endpoint import Bounds, Endpoint, ServerError
from async_flowrl.rewards.http_contract import dumps
from async_flowrl.rewards.ocr import normalise
from async_flowrl.rewards.vlm_judge_cache import ReplyCache
from async_flowrl.rewards.vlm_judge_reply import Answer, expected_value, score_after, scores_in, transcription_score
from async_flowrl.rewards.vlm_judge_request import (
    GROUP_TEMPLATE,
    MAX_TOKENS,
    PROBABILITIES,
    SCORE,
    TEMPLATES,
    TRANSCRIBE,
    Question,
    digest_of,
    png_url,
)
from async_flowrl.types import ByteArray, Prompt

logger = logging.getLogger(__name__)

MAX_REPLY_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Verdict:
    """One image's score, and the extras that are logged beside it."""

    score: float
    extras: Mapping[str, float | str]

    @property
    def result(self) -> dict[str, float | str]:
        return {"score": self.score, **self.extras}


@dataclass(eq=False)
class VLMJudge:
    """Scores images by a judge's answers; an answer without a readable score raises an error and never counts as 0.

    - `mode`: `score` reads JSON with a number within `range`, scaled to 0 .. 1 by `normalise`; `transcribe` compares
      the text that the judge reads with `prompt.target`, as the reward `ocr` does; `probabilities` is the expected
      value of `answers` (text → number) by their probabilities as first token, which together must reach `min_mass`.
    - `images`: `one_by_one`, or `group` for one call with all images of a group.
    - `base_url`: one URL or several; None where the term has `serve`. `api_key_env`: the key's environment variable.
    - `cache`: folder of stored replies; None means `judge_cache` in the run directory.
    - `timeout`, `deadline`: seconds for one attempt, and for a call with all its attempts.
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
    images: str = checks.ONE_BY_ONE
    structured: bool = True
    after: str | None = None
    """Text before the score in a free answer; the number after its last occurrence is read. None reads JSON."""
    temperature: float = 0.0
    seed: int | None = 0
    max_tokens: int | None = None
    top_logprobs: int = checks.MAX_TOP_LOGPROBS
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    api_key_env: str | None = None
    version: str = ""
    timeout: float = 60.0
    deadline: float = 240.0
    retries: int = 4
    concurrency: int = 32
    cache: str | None = None

    deterministic: ClassVar[bool] = False
    wants_server: ClassVar[tuple[str, str]] = ("base_url", "http://127.0.0.1:8000/v1")
    """Option that is required unless the term has `serve`, and an example of its value."""

    def __post_init__(self) -> None:
        """Raises ValueError, one sentence, for an option outside its range."""
        if not self.model:
            raise ValueError("the vlm_judge reward needs model, the name that the server has for it")
        checks.check_mode(self.mode, self.images, self.after)
        tokens = MAX_TOKENS[self.mode] if self.max_tokens is None else self.max_tokens
        checks.check_numbers(asdict(self) | {"max_tokens": tokens})
        self._group = self.images == checks.GROUP
        template = self.prompt_template or (GROUP_TEMPLATE if self._group else TEMPLATES[self.mode])
        self._needs_target = "target" in checks.check_template(template, self.mode) or self.mode == TRANSCRIBE
        self._values = checks.answers_of(self.answers)
        self._question = self._asking(template, tokens)
        bounds = Bounds(self.timeout, self.deadline, self.retries, MAX_REPLY_BYTES, self.concurrency)
        self._endpoint = Endpoint(checks.urls_of(self.base_url), bounds, "api_key_env", self.api_key_env)
        self._cache = None if self.cache is None else ReplyCache(Path(self.cache).expanduser())

    def _asking(self, template: str, max_tokens: int) -> Question:
        return Question(
            model=self.model,
            template=template,
            system=self.system,
            mode=self.mode,
            bounds=checks.bounds_of(self.range),
            answers=tuple(self._values),
            group=self._group,
            structured=self.structured and self.after is None,
            temperature=self.temperature,
            seed=self.seed,
            max_tokens=max_tokens,
            top_logprobs=self.top_logprobs,
            extra_body=dict(self.extra_body),
        )

    def check(self, prompt: Prompt) -> None:
        """Raises ValueError if the judge needs a target and the prompt has none."""
        if self._needs_target and not normalise(prompt.target or ""):
            what = "mode=transcribe" if self.mode == TRANSCRIBE else "{target} in prompt_template"
            raise ValueError(f"{what} needs a target, and prompt {prompt.text!r} has none in double quotes or a column")

    def connect(self, urls: Sequence[str], token: str | None) -> None:
        """Replaces the URLs and the token by those of servers that the run has started; `/v1` is added to each URL."""
        self._endpoint.connect(checks.urls_of([f"{url.rstrip('/')}/v1" for url in urls]), token)

    def keep_in(self, folder: Path) -> None:
        """Stores replies in `judge_cache` of the run directory `folder`, unless `cache` names another folder."""
        if self._cache is None:
            self._cache = ReplyCache(folder / "judge_cache")

    async def __call__(self, images: ByteArray, prompt: Prompt) -> list[dict[str, float | str]]:
        """Returns score and extras per image. Raises ServerError once all calls have ended; good replies are kept."""
        self.check(prompt)
        calls = [list(images)] if self._group else [[image] for image in images]
        keys = [self._question.key(prompt, [digest_of(image) for image in call], self.version) for call in calls]
        asked = dict(zip(keys, calls, strict=True))
        if self._cache is not None:
            await asyncio.to_thread(self._cache.refresh)
        ended = await asyncio.gather(
            *(self._judged(key, call, prompt) for key, call in asked.items()), return_exceptions=True
        )
        if self._cache is not None:
            await asyncio.to_thread(self._cache.sync)
        failures = [each for each in ended if isinstance(each, BaseException)]
        if failures and isinstance(failures[0], ServerError):
            raise ServerError(f"{failures[0]} ({len(failures)} of {len(ended)} calls failed)") from failures[0]
        verdicts: dict[bytes, list[Verdict]] = {}
        for key, result in zip(asked, ended, strict=True):
            if isinstance(result, BaseException):
                raise result
            verdicts[key] = result
        return [verdict.result for key in keys for verdict in verdicts[key]]

    async def _judged(self, key: bytes, images: list[ByteArray], prompt: Prompt) -> list[Verdict]:
        kept = None if self._cache is None else self._cache.get(key)
        if kept is not None:
            return self._verdicts(kept, len(images), prompt, cached=True)
        body = dumps(self._question.body(prompt, [png_url(image) for image in images]))

        def read(content: bytes) -> tuple[Answer, list[Verdict]]:
            answer = Answer.of(content)
            return answer, self._verdicts(answer, len(images), prompt, cached=False)

        answer, verdicts = await self._endpoint.post(body, "application/json", key[0], read)
        self._keep(key, answer)
        return verdicts

    def _keep(self, key: bytes, answer: Answer) -> None:
        """Stores a reply. If the folder cannot be written, it warns and stores no more replies in this worker."""
        if self._cache is None:
            return
        try:
            self._cache.put(key, answer)
        except OSError as error:
            logger.warning("the judge's replies are no longer kept in %s: %s", self._cache.folder, error)
            self._cache = None

    def _verdicts(self, answer: Answer, count: int, prompt: Prompt, *, cached: bool) -> list[Verdict]:
        said: dict[str, float | str] = {"text": answer.text, "cached": float(cached)}
        if self.mode == TRANSCRIBE:
            return [Verdict(transcription_score(answer, prompt.target or ""), said | {"cut": float(answer.cut)})]
        if self.mode == PROBABILITIES:
            score, probabilities = expected_value(answer, self._values, min_mass=self.min_mass)
            return [Verdict(score, said | {f"p.{_word(name)}": p for name, p in probabilities.items()})]
        low, high = self._question.bounds
        if self.after is not None:
            scores = [score_after(answer, self.after, (low, high))]
        else:
            scores = scores_in(answer, count, (low, high), group=self._group)
        return [Verdict((score - low) / (high - low) if self.normalise else score, said) for score in scores]


def _word(name: str) -> str:
    """Returns an answer in the form of a metric name."""
    return re.sub(r"[^\w.-]", "_", name)
