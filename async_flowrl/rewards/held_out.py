"""Held-out terms: the rewards of `evaluate.reward.terms`, which score images of evaluations and are never trained on.

A held-out term that fails does not fail the evaluation: the scores of the other terms are kept, and the failure is
reported.
"""

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
from async_flowrl.rewards.call import Attempts
from async_flowrl.rewards.composite import Term, scored_terms
from async_flowrl.rewards.registry import build_reward, check_prompts, check_rewards
from async_flowrl.types import ByteArray, Prompt, Span

RESERVED = ("reward", "diversity", "held_out")
"""Names that a held-out term must not have, as metrics.jsonl uses them; also those that begin with `diversity_`."""


@dataclass(frozen=True)
class HeldOutScores:
    """The scores of one group (the images of one prompt) by held-out terms. Picklable."""

    by_term: Mapping[str, tuple[float, ...]]
    """Term → scores in image order."""
    failed: Mapping[str, str]
    """Term that has no scores → reason, one sentence."""
    spans: tuple[Span, ...] = ()
    distances: Mapping[str, float] = field(default_factory=dict)
    """Term with a `features` method → mean cosine distance between two images of the group."""
    extras: Mapping[str, Mapping[str, tuple[float | str, ...]]] = field(default_factory=dict)
    """Term → name → a further text or number about each image; as in `Scores`."""


@contextmanager
def _renaming() -> Iterator[None]:
    """Makes errors of the registry, which writes `reward.terms`, name `evaluate.reward.terms`."""
    try:
        yield
    except ValueError as error:
        said = re.sub(r"(?<!evaluate\.)\breward\.terms\b", "evaluate.reward.terms", str(error))
        raise ValueError(said) from error


def check_held_out(config: Config) -> bool:
    """Checks names, options and signatures of all held-out terms without building anything.

    Returns True if a term needs a target (for example the text to be written) in every prompt. Raises ValueError, one
    sentence, if a term cannot score evaluations.
    """
    terms = config.evaluate.reward.terms
    for name in terms:
        where = f"evaluate.reward.terms.{name}"
        if name in RESERVED or name.startswith("diversity_"):
            raise ValueError(
                f"{where}: {name!r} is a name that metrics.jsonl uses for something else; choose another key"
            )
        if name in config.reward.terms:
            raise ValueError(
                f"{where}: reward.terms has {name!r} too, and a term is either trained on or held out; choose another "
                f"key, with name: {terms[name].name or name}"
            )
    with _renaming():
        return bool(terms) and check_rewards(RewardConfig(terms=terms))


@_renaming()
def check_held_out_prompts(config: Config, prompts: Iterable[Prompt]) -> None:
    """Raises ValueError for the first prompt that a held-out term cannot score."""
    check_prompts(RewardConfig(terms=config.evaluate.reward.terms), prompts)


@_renaming()
def build_held_out(terms: Mapping[str, RewardTerm]) -> tuple[Term, ...]:
    """Builds the terms; empty without any. Raises ValueError, one sentence, if one cannot be built."""
    return build_reward(RewardConfig(terms=dict(terms))).terms if terms else ()


async def score_held_out(
    terms: Iterable[Term],
    names: Collection[str],
    prompt: Prompt,
    images: ByteArray,
    executor: Executor,
    *,
    attempts: Attempts | None = None,
) -> HeldOutScores:
    """Scores images uint8 [n, H, W, 3] by the terms in `names`, concurrently and independently of each other.

    A term whose scoring raises RewardError, or whose `features` fail, is in `failed`, without scores.
    """
    asked = [term for term in terms if term.name in names]
    results = await scored_terms(asked, prompt, images, executor, attempts or Attempts())
    by_term = {name: result.scores for name, result in results.items() if result.failure is None}
    extras = {name: results[name].extras for name in by_term if results[name].extras}
    failed = {name: result.failure.reason for name, result in results.items() if result.failure is not None}
    spans = tuple(results[name].span for name in by_term)
    featured = [term for term in asked if term.name in by_term and hasattr(term.reward, "features")]
    loop = asyncio.get_running_loop()
    distances: dict[str, float] = {}
    for term in featured:
        try:
            distance = await loop.run_in_executor(executor, cosine_distance, term.reward, images)
        except (Exception, SystemExit) as error:  # a failure of one term must not lose the other terms' scores
            del by_term[term.name]
            extras.pop(term.name, None)
            failed[term.name] = (
                f"reward {term.name!r} has no features of the images of {prompt.text!r}: {in_one_line(error)}"
            )
            continue
        if distance is not None:
            distances[term.name] = distance
    return HeldOutScores(by_term, failed, spans, distances, extras=extras)


def joined(answers: Iterable[HeldOutScores]) -> HeldOutScores:
    """Returns the scores of one group by several sets of terms as one; the callers have taken `spans`."""
    given = list(answers)

    def union(part: str) -> dict[str, Any]:
        return {term: value for answer in given for term, value in getattr(answer, part).items()}

    return HeldOutScores(union("by_term"), union("failed"), distances=union("distances"), extras=union("extras"))


def cosine_distance(reward: Any, images: ByteArray) -> float | None:
    """Returns the mean of 1 - cosine over all pairs of images, by the vectors `reward.features(images)` [n, d].

    Returns None for fewer than two images. A zero vector has cosine 0 to every other. Raises ValueError if the features
    are not n vectors of finite numbers.
    """
    if len(images) < 2:
        return None
    features = np.asarray(reward.features(images), dtype=np.float64)
    if features.ndim != 2 or len(features) != len(images):
        raise ValueError(f"expected {len(images)} vectors of finite numbers, got shape {features.shape}")
    if not np.isfinite(features).all():
        raise ValueError(f"expected {len(images)} vectors of finite numbers, got one that is not finite")
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    unit = features / np.where(lengths > 0.0, lengths, 1.0)
    return float(np.mean(1.0 - (unit @ unit.T)[np.triu_indices(len(images), k=1)]))
