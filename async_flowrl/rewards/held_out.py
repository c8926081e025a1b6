"""Held-out terms: the rewards of `evaluate.reward.terms`, which score images of evaluations and never train."""

import asyncio
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from async_flowrl.config.messages import in_one_line
from async_flowrl.config.schema import Config, RewardConfig, RewardTerm
from async_flowrl.rewards.call import Term
from async_flowrl.rewards.composite import scored_terms
from async_flowrl.rewards.registry import build_reward, check_prompts, check_rewards
from async_flowrl.types import ByteArray, Prompt, Span

# Names that metrics.jsonl uses itself; also those that begin with `diversity_`.
RESERVED = ("reward", "diversity", "held_out")


@dataclass(frozen=True)
class HeldOutScores:
    """The scores of one group (the images of one prompt) by held-out terms. Picklable.

    `failed` has the reason for terms without scores; `distances`, for terms with `features`, the mean cosine distance
    between two images of the group; `extras` is as in `Scores`.
    """

    by_term: Mapping[str, tuple[float, ...]]
    failed: Mapping[str, str]
    spans: tuple[Span, ...] = ()
    distances: Mapping[str, float] = field(default_factory=dict)
    extras: Mapping[str, Mapping[str, tuple[float | str, ...]]] = field(default_factory=dict)


@contextmanager
def _renaming() -> Iterator[None]:
    """Makes errors of the registry, which writes `reward.terms`, name `evaluate.reward.terms`."""
    try:
        yield
    except ValueError as error:
        sentence = re.sub(r"(?<!evaluate\.)\breward\.terms\b", "evaluate.reward.terms", str(error))
        raise ValueError(sentence) from error


def check_held_out(config: Config) -> bool:
    """Checks names, options and signatures of all held-out terms; returns True if one needs a target in every prompt.

    Nothing is built. Raises ValueError, one sentence, if a term cannot score evaluations.
    """
    terms = config.evaluate.reward.terms
    for name in terms:
        where = f"evaluate.reward.terms.{name}"
        if name in RESERVED or name.startswith("diversity_"):
            raise ValueError(f"{where}: metrics.jsonl uses the name {name!r} for something else; choose another key")
        if name in config.reward.terms:
            another = f"choose another key, with name: {terms[name].name or name}"
            raise ValueError(
                f"{where}: reward.terms has {name!r} too, and no term is both trained and held out; {another}"
            )
    with _renaming():
        return bool(terms) and check_rewards(RewardConfig(terms=terms))


@_renaming()
def check_held_out_prompts(config: Config, prompts: Iterable[Prompt]) -> None:
    """Raises ValueError for the first prompt that a held-out term cannot score."""
    check_prompts(RewardConfig(terms=config.evaluate.reward.terms), prompts)


@_renaming()
def build_held_out(terms: Mapping[str, RewardTerm]) -> tuple[Term, ...]:
    """Builds the terms. Raises ValueError, one sentence, if one cannot be built."""
    return build_reward(RewardConfig(terms=dict(terms))).terms if terms else ()


async def score_held_out(
    terms: Iterable[Term],
    names: Collection[str],
    prompt: Prompt,
    images: ByteArray,
    executor: Executor,
    config: RewardConfig,
) -> HeldOutScores:
    """Scores images uint8 [n, H, W, 3] by the terms in `names`, concurrently and independently of each other.

    A term whose scoring raises RewardError, or whose `features` fail, is in `failed`, without scores.
    """
    chosen = [term for term in terms if term.name in names]
    results = await scored_terms(chosen, prompt, images, executor, config)
    by_term = {name: result.scores for name, result in results.items() if result.failure is None}
    extras = {name: results[name].extras for name in by_term if results[name].extras}
    failed = {name: result.failure.reason for name, result in results.items() if result.failure is not None}
    spans = tuple(results[name].span for name in by_term)
    loop = asyncio.get_running_loop()
    distances: dict[str, float] = {}
    for name, reward in ((term.name, term.reward) for term in chosen if hasattr(term.reward, "features")):
        if name not in by_term or len(images) < 2:
            continue
        try:
            distances[name] = await loop.run_in_executor(executor, cosine_distance, reward, images)
        except (Exception, SystemExit) as error:  # a failure of one term must not lose the other terms' scores
            del by_term[name]
            extras.pop(name, None)
            failed[name] = f"reward {name!r} has no features of the images of {prompt.text!r}: {in_one_line(error)}"
    return HeldOutScores(by_term, failed, spans, distances, extras=extras)


def joined(answers: Iterable[HeldOutScores]) -> HeldOutScores:
    """Returns the scores of one group by several sets of terms as one; the callers have taken `spans`."""
    parts = list(answers)

    def union(field: str) -> dict[str, Any]:
        return {term: value for part in parts for term, value in getattr(part, field).items()}

    return HeldOutScores(union("by_term"), union("failed"), distances=union("distances"), extras=union("extras"))


def cosine_distance(reward: Any, images: ByteArray) -> float:
    """Returns the mean of 1 - cosine over all pairs of images, by the vectors `reward.features(images)` [n, d].

    A zero vector has cosine 0 to every other. Raises ValueError if the features are not n vectors of finite numbers.
    """
    features = np.asarray(reward.features(images), dtype=np.float64)
    if features.ndim != 2 or len(features) != len(images):
        raise ValueError(f"expected {len(images)} vectors, got an array of shape {list(features.shape)}")
    if not np.isfinite(features).all():
        raise ValueError("expected vectors of finite numbers, got NaN or infinity")
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    unit = features / np.where(lengths > 0.0, lengths, 1.0)
    return float(np.mean(1.0 - (unit @ unit.T)[np.triu_indices(len(images), k=1)]))
