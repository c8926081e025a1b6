"""A weighted sum of rewards, scored together."""

import asyncio
import inspect
import math
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from async_flowrl.rewards.base import Reward, RewardError
from async_flowrl.types import ByteArray, Prompt, Scores, Span


@dataclass(frozen=True)
class Term:
    """One reward of the sum; `name` is its key under `reward.terms`."""

    name: str
    weight: float
    reward: Reward

    @property
    def needs_target(self) -> bool:
        return bool(getattr(self.reward, "needs_target", False))


@dataclass(frozen=True)
class CompositeReward:
    terms: tuple[Term, ...]

    @property
    def needs_target(self) -> bool:
        """Whether any term needs `prompt.target`."""
        return any(term.needs_target for term in self.terms)

    @property
    def weights(self) -> Mapping[str, float]:
        return {term.name: term.weight for term in self.terms}

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Raises ValueError for the first prompt that a term cannot score, naming both."""
        checks = [(term.name, term.reward.check) for term in self.terms if hasattr(term.reward, "check")]
        for prompt in prompts:
            for name, check in checks:
                try:
                    check(prompt)
                except ValueError as error:
                    raise ValueError(f"reward {name!r}: {error}") from error

    async def score(self, prompt: Prompt, images: ByteArray, executor: Executor) -> Scores:
        """Scores of images uint8 [n, H, W, 3]; the terms run side by side, plain functions on `executor`'s threads.

        Raises RewardError; if several terms fail, the first in configuration order.
        """
        start = time.time()
        results = await asyncio.gather(
            *(_run(term, prompt, images, executor) for term in self.terms), return_exceptions=True
        )
        by_term: dict[str, tuple[float, ...]] = {}
        spans: list[Span] = []
        for term, result in zip(self.terms, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            by_term[term.name], span = result
            spans.append(span)
        total = tuple(
            sum(term.weight * by_term[term.name][image] for term in self.terms) for image in range(len(images))
        )
        whole = Span("score", start, time.time())
        return Scores(total=total, by_term=by_term, spans=(whole, *spans) if len(spans) > 1 else (whole,))


async def _run(term: Term, prompt: Prompt, images: ByteArray, executor: Executor) -> tuple[tuple[float, ...], Span]:
    start = time.time()
    try:
        result = await asyncio.get_running_loop().run_in_executor(executor, term.reward, images, prompt)
        if inspect.isawaitable(result):
            result = await result
    except Exception as error:
        raise RewardError(
            f"reward {term.name!r} failed on prompt {prompt.text!r}: {type(error).__name__}: {error}"
        ) from error
    return checked(term.name, prompt, result, len(images)), Span(f"score/{term.name}", start, time.time())


def checked(name: str, prompt: Prompt, result: object, count: int) -> tuple[float, ...]:
    """`result` as `count` finite float64 numbers, or RewardError naming reward, prompt and what came back."""
    where = f"reward {name!r} on prompt {prompt.text!r} must return {count} finite numbers"
    try:
        values = np.asarray(result, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise RewardError(f"{where}, got {result!r}") from error
    if values.shape != (count,):
        raise RewardError(f"{where}, got shape {list(values.shape)}: {result!r}")
    numbers = tuple(float(value) for value in values)
    if not all(math.isfinite(number) for number in numbers):
        raise RewardError(f"{where}, got {list(numbers)}")
    return numbers
