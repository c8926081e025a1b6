"""Advantages of groups from their scores, also if a group lacks an optional reward term; handed.py calls it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from async_flowrl.algorithms.base import Algorithm
from async_flowrl.config.schema import Config
from async_flowrl.types import Scores

FloatArray = npt.NDArray[np.float64]


def group_advantages(
    algorithm: Algorithm, config: Config, scores: Sequence[Scores], seeds: Sequence[int]
) -> list[FloatArray]:
    """Returns one float64 array [n] of advantages per group of n images, in the order of `scores`.

    `seeds` holds one seed per group, used only if the setting `algorithm.permute_advantages` shuffles the advantages.

    A group that lacks an optional term gets the sum of its other terms. If each term is normalised separately
    (`algorithm.combine=per_reward`), the group does not count in the statistics of the term that it lacks.
    """
    if not scores:
        return []
    terms = config.reward.terms
    weights = {name: term.weight for name, term in terms.items()}
    whole = all(name in each.by_term for each in scores for name in terms)
    if whole or config.algorithm.combine == "sum":
        rewards = {name: [_values(each, name) for each in scores] for name in terms}
        return list(algorithm.advantages(rewards, weights=weights, seeds=seeds))
    total = [np.zeros(len(each.total)) for each in scores]
    for name in terms:
        for index, part in _one_term(algorithm, name, weights[name], scores, seeds).items():
            total[index] = total[index] + part
    return total


def _one_term(
    algorithm: Algorithm,
    name: str,
    weight: float,
    scores: Sequence[Scores],
    seeds: Sequence[int],
) -> Mapping[int, FloatArray]:
    """Returns the weighted advantages of one term: index of a group that has the term → array [n]."""
    there = _there(scores, name)
    if not there:
        return {}
    rewards: dict[str, Any] = {name: [_values(scores[index], name) for index in there]}
    parts = algorithm.advantages(rewards, weights={name: weight}, seeds=[seeds[index] for index in there])
    return dict(zip(there, parts, strict=True))


def _there(scores: Sequence[Scores], name: str) -> list[int]:
    """Returns the indices of the groups that have the term's scores."""
    return [index for index, each in enumerate(scores) if name in each.by_term]


def _values(scores: Scores, name: str) -> FloatArray:
    """Returns the term's scores [n], or zeros, which do not change a sum, if the group lacks the term."""
    values = scores.by_term.get(name)
    return np.zeros(len(scores.total)) if values is None else np.asarray(values, dtype=np.float64)
