"""Advantages: computes one number per image from the rewards of its group, in float64 numpy.

The controller calls this when it hands groups to the trainer, where all trained denoising steps of an image use the
same advantage.
"""

import random
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from async_flowrl.config.schema import AlgorithmConfig

FloatArray = npt.NDArray[np.float64]
Groups = Sequence[FloatArray]
# Added to the standard deviation before the division, as in flow_grpo's code.
EPS = 1e-4
# Least std of a batch's advantages that gdpo divides by, as in Flow-Factory's code.
MIN_BATCH_STD = 1e-6


class GroupAdvantages:
    """Base class of the built-in algorithms: its advantages and the choice of images follow `algorithm.*`."""

    def __init__(self, config: AlgorithmConfig, *, correction: str = "none") -> None:
        self.config = config
        self.group_local = not config.global_std and config.combine != "gdpo"

    def advantages(
        self,
        rewards: Mapping[str, Groups],
        *,
        weights: Mapping[str, float] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> list[FloatArray]:
        return compute_advantages(rewards, self.config, weights=weights, seeds=seeds)

    def select(self, advantages: FloatArray) -> list[int]:
        """Returns the images that train: all, or of `train_images_per_group` one half the best, one half the worst.

        This is bestofn of DanceGRPO's code (arXiv 2505.07818). An odd number has one more of the best; of equal images
        the first are taken as best and the last as worst.
        """
        size = len(advantages)
        count = size if self.config.train_images_per_group is None else self.config.train_images_per_group
        order = np.argsort(-advantages, kind="stable").tolist()
        return sorted([*order[: count - count // 2], *order[size - count // 2 :]])


def compute_advantages(
    rewards: Mapping[str, Groups],
    config: AlgorithmConfig,
    *,
    weights: Mapping[str, float] | None = None,
    seeds: Sequence[int] | None = None,
) -> list[FloatArray]:
    """Returns one float64 array [n] per group of n images: `group_advantages` of the weighted rewards.

    `rewards` holds, per name of a reward, the groups' raw rewards [n]; `weights` has one factor per name (None: all 1).
    `combine=sum` adds the weighted rewards and normalises the sum; `per_reward` normalises each reward and adds the
    weighted results; `gdpo` then whitens these over all given groups (GDPO, arXiv 2601.05242). `global_std` divides by
    the std of all given groups. Two settings exist to test that learning comes from the rewards: `negate_reward`
    changes their sign, `permute_advantages` shuffles the advantages of each group and needs one of `seeds` per group.
    Raises ValueError for rewards that are not lists of finite numbers, none, or missing seeds.
    """
    sign = -1.0 if config.negate_reward else 1.0
    factors = {name: sign * (1.0 if weights is None else weights[name]) for name in rewards}
    arrays = {name: _checked(name, groups) for name, groups in rewards.items()}
    if config.combine == "sum":
        result = _normalised(_weighted_sum(arrays, factors), config)
    else:
        result = _weighted_sum({name: _normalised(groups, config) for name, groups in arrays.items()}, factors)
    if config.combine == "gdpo":
        together = np.concatenate(result)
        mean, std = together.mean(), max(float(together.std()), MIN_BATCH_STD)
        # The mean is 0 but for rounding, which must not move a group of equal rewards away from 0.
        result = [(group - mean) / std if group.any() else group for group in result]
    if not config.permute_advantages:
        return result
    if seeds is None or len(seeds) != len(result):
        raise ValueError(f"permute_advantages needs one seed per group ({len(result)}), got {seeds}")
    return [permuted(group, seed) for group, seed in zip(result, seeds, strict=True)]


def permuted(values: FloatArray, seed: int) -> FloatArray:
    order = list(range(len(values)))
    random.Random(seed).shuffle(order)
    return values[order]


def is_constant(group: FloatArray) -> bool:
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
    """Returns the advantages of one group with rewards r [n]: (r - mean) / (S + 1e-4), float64 [n].

    S is the group's population standard deviation, or `batch_std` if that is given (Flow-GRPO, arXiv 2505.05470, eq.
    5). `normalise="none"` only subtracts the mean (Dr.GRPO, arXiv 2503.20783). If all rewards are equal, the advantages
    are exactly 0. Raises ValueError if `rewards` is empty or not finite.
    """
    (group,) = _checked("rewards", [np.asarray(rewards, np.float64)])
    # Rounding can make the mean of equal numbers differ from them; Adam would turn the tiny rest into a full step.
    if is_constant(group):
        return np.zeros_like(group)
    centred: FloatArray = group - group.mean()
    if normalise == "none":
        return centred
    scale = float(np.std(group)) if batch_std is None else batch_std
    return np.divide(centred, scale + EPS)
