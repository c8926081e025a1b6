"""Held-out terms: rewards of `evaluate.reward.terms`, which score evaluations and are never trained on.

One that fails takes nothing with it: the other terms' scores stand, and the failure is named.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from async_flowrl.config.messages import in_one_line
from async_flowrl.config.schema import Config, RewardConfig, RewardTerm
from async_flowrl.rewards.base import RewardError
from async_flowrl.rewards.call import Attempts
from async_flowrl.rewards.composite import CompositeReward, Term
from async_flowrl.rewards.registry import build_reward, check_prompts, check_rewards
from async_flowrl.types import ByteArray, Prompt, Scores, Span

RESERVED = ("reward", "diversity", "held_out")
"""Names of curves and of parts of metric names, which no held-out term may have."""


@dataclass(frozen=True)
class HeldOutScores:
    """What held-out terms say of one group, and why the others say nothing. Picklable."""

    by_term: Mapping[str, tuple[float, ...]]
    failed: Mapping[str, str]
    spans: tuple[Span, ...] = ()
    distances: Mapping[str, float] = field(default_factory=dict)
    """By term that has features of images: the mean distance of two images in them."""
    served: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    """As in `Scores`."""


def check_held_out(config: Config) -> bool:
    """Checks names, options and signatures without building anything; returns whether a term needs a target.

    Raises ValueError, one sentence, for what cannot score evaluations.
    """
    terms = config.evaluate.reward.terms
    for name, term in terms.items():
        where = f"evaluate.reward.terms.{name}"
        if name in RESERVED or name.startswith("diversity_"):
            raise ValueError(f"{where}: {name!r} is the name of something else in metrics.jsonl; choose another key")
        if name in config.reward.terms:
            raise ValueError(
                f"{where}: reward.terms has {name!r} too, and a curve is either trained or held out; choose another "
                f"key and say name: {term.name or name}"
            )
        for seat in ("workers", "gpus_per_worker", "threads"):
            if getattr(term, seat, None) is not None:
                raise ValueError(
                    f"{where}.{seat}: held-out terms are scored by the workers of the reward pool; use "
                    f"reward.{'num_workers' if seat == 'workers' else seat}"
                )
    try:
        return bool(terms) and check_rewards(RewardConfig(terms=terms))
    except ValueError as error:
        raise _renamed(error) from error


def check_held_out_prompts(config: Config, prompts: Iterable[Prompt]) -> None:
    """Raises ValueError for the first prompt that a held-out term cannot score."""
    try:
        check_prompts(RewardConfig(terms=config.evaluate.reward.terms), prompts)
    except ValueError as error:
        raise _renamed(error) from error


def build_held_out(terms: Mapping[str, RewardTerm]) -> tuple[Term, ...]:
    """The terms, built one by one. Raises ValueError, one sentence, for what cannot be built."""
    if not terms:
        return ()
    try:
        return build_reward(RewardConfig(terms=dict(terms))).terms
    except ValueError as error:
        raise _renamed(error) from error


async def score_held_out(
    terms: Iterable[Term],
    names: Collection[str],
    prompt: Prompt,
    images: ByteArray,
    executor: Executor,
    *,
    attempts: Attempts | None = None,
) -> HeldOutScores:
    """Scores of images uint8 [n, H, W, 3] by the named terms, side by side, each for itself."""
    tries = attempts or Attempts()
    asked = [term for term in terms if term.name in names]
    results = await asyncio.gather(
        *(CompositeReward((term,), tries).score(prompt, images, executor) for term in asked), return_exceptions=True
    )
    by_term: dict[str, tuple[float, ...]] = {}
    failed: dict[str, str] = {}
    spans: list[Span] = []
    for term, result in zip(asked, results, strict=True):
        if isinstance(result, Scores):
            by_term[term.name] = tuple(result.by_term[term.name])
            spans += [replace(span, name=f"score/{term.name}") for span in result.spans[:1]]
        elif isinstance(result, RewardError):
            failed[term.name] = str(result)
        else:
            raise result
    featured = [term for term in asked if term.name in by_term and hasattr(term.reward, "features")]
    loop = asyncio.get_running_loop()
    distances: dict[str, float] = {}
    for term in featured:
        try:
            found = await loop.run_in_executor(executor, cosine_distance, term.reward, images)
        except Exception as error:  # whatever a term's own features do: the other terms' scores stand
            del by_term[term.name]
            failed[term.name] = f"reward {term.name!r} has no features of prompt {prompt.text!r}: {in_one_line(error)}"
            continue
        if found is not None:
            distances[term.name] = found
    return HeldOutScores(by_term, failed, tuple(spans), distances)


def cosine_distance(reward: Any, images: ByteArray) -> float | None:
    """Mean over pairs of images of 1 - the cosine of their `reward.features`; None for a single image.

    A vector of zeros has the cosine 0 to every other. Raises ValueError for what are no vectors of numbers.
    """
    if len(images) < 2:
        return None
    features = np.asarray(reward.features(images), dtype=np.float64)
    if features.ndim != 2 or len(features) != len(images) or not np.isfinite(features).all():
        raise ValueError(f"expected {len(images)} vectors of finite numbers, got shape {features.shape}")
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    unit = features / np.where(lengths > 0.0, lengths, 1.0)
    return float(np.mean(1.0 - (unit @ unit.T)[np.triu_indices(len(images), k=1)]))


def _renamed(error: ValueError) -> ValueError:
    """The registry's sentence, with the key that the person wrote."""
    return ValueError(str(error).replace("reward.terms", "evaluate.reward.terms", 1))
