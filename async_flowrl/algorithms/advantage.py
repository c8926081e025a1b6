"""Advantages: float64 numpy, once per sample, before any expansion over denoising steps."""

import random
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from async_flowrl.config.algorithm_schema import AlgorithmConfig
from async_flowrl.config.messages import unknown_name

FloatArray = npt.NDArray[np.float64]
Groups = Sequence[FloatArray]
NORMALISES = ("std", "none")
EPS = 1e-4
"""Added to the std, as flow_grpo does."""


class GroupAdvantages:
    """Base of the built-in algorithms: advantages from the configuration, every sample of a group trained."""

    def __init__(self, config: AlgorithmConfig) -> None:
        self.config = config
        self.group_local = not config.global_std

    def advantages(
        self,
        rewards: Mapping[str, Groups],
        *,
        weights: Mapping[str, float] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> list[FloatArray]:
        """One array [n] per group; see `compute_advantages`."""
        return compute_advantages(rewards, self.config, weights=weights, seeds=seeds)

    def select(self, advantages: FloatArray) -> list[int]:
        """All samples of the group, in order."""
        return list(range(len(advantages)))


def compute_advantages(
    rewards: Mapping[str, Groups],
    config: AlgorithmConfig,
    *,
    weights: Mapping[str, float] | None = None,
    seeds: Sequence[int] | None = None,
) -> list[FloatArray]:
    """One array [n] per group: (r - group mean) / (S + 1e-4), exactly 0 where a group's rewards are all equal.

    S is the population std of the group, or with `global_std` of all groups given; `normalise=none` leaves it out
    (Dr.GRPO). `rewards` holds per reward name the groups' raw rewards; `weights` their weights (1 if None).
    `combine=sum` adds the weighted rewards first, `per_reward` normalises each and adds the weighted advantages.
    The falsifiers: `negate_reward`, and `permute_advantages` with one of `seeds` per group.
    """
    sign = -1.0 if config.negate_reward else 1.0
    factors = {name: sign * (1.0 if weights is None else weights[name]) for name in rewards}
    arrays = {name: _checked(name, groups) for name, groups in rewards.items()}
    if config.combine == "sum":
        result = _normalised(_weighted_sum(arrays, factors), config)
    else:
        result = _weighted_sum({name: _normalised(groups, config) for name, groups in arrays.items()}, factors)
    if not config.permute_advantages:
        return result
    if seeds is None or len(seeds) != len(result):
        raise ValueError(f"permute_advantages needs one seed per group ({len(result)}), got {seeds}")
    return [permuted(group, seed) for group, seed in zip(result, seeds, strict=True)]


def permuted(values: FloatArray, seed: int) -> FloatArray:
    """The same values in an order drawn from `seed`: they say nothing about the images any more."""
    order = list(range(len(values)))
    random.Random(seed).shuffle(order)
    return values[order]


def is_constant(group: FloatArray) -> bool:
    """Whether all values are equal, exactly."""
    return bool(np.all(group == group[0]))


def _checked(name: str, groups: Groups) -> list[FloatArray]:
    arrays = [np.asarray(group, dtype=np.float64) for group in groups]
    for index, group in enumerate(arrays):
        if group.ndim != 1 or group.size == 0 or not np.isfinite(group).all():
            raise ValueError(f"reward {name!r} of group {index} must be a list of finite numbers, got {group.tolist()}")
    return arrays


def _weighted_sum(arrays: Mapping[str, Groups], factors: Mapping[str, float]) -> list[FloatArray]:
    if not arrays:
        raise ValueError("at least one reward is needed, got none")
    parts = [[factors[name] * group for group in groups] for name, groups in arrays.items()]
    return [np.sum(group_parts, axis=0) for group_parts in zip(*parts, strict=True)]


def _normalised(groups: Groups, config: AlgorithmConfig) -> list[FloatArray]:
    batch_std = float(np.std(np.concatenate(list(groups)))) if config.global_std else None
    return [group_advantages(group, normalise=config.normalise, batch_std=batch_std) for group in groups]


def group_advantages(rewards: npt.ArrayLike, *, normalise: str = "std", batch_std: float | None = None) -> FloatArray:
    """(r - mean) / (S + 1e-4), float64 [n], of the rewards [n] of one group: Flow-GRPO's (arXiv 2505.05470, eq. 5).

    S is the group's population std, or `batch_std` where it is given. `normalise="none"` only subtracts the mean
    (Dr.GRPO, arXiv 2503.20783). Exactly 0 where all rewards are equal. ValueError for an unknown `normalise` and for
    rewards that are no list of finite numbers.
    """
    if normalise not in NORMALISES:
        raise ValueError(unknown_name("normalise", normalise, NORMALISES))
    (group,) = _checked("rewards", [np.asarray(rewards, np.float64)])
    # The mean of equal numbers need not be that number in floating point; Adam would turn the rest into a full step.
    if is_constant(group):
        return np.zeros_like(group)
    centred: FloatArray = group - group.mean()
    if normalise == "none":
        return centred
    scale = float(np.std(group)) if batch_std is None else batch_std
    return np.divide(centred, scale + EPS)
