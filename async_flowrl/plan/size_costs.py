"""Sizes of a run's training images: each has a share of the groups, and a cost in relation to the largest size.

They are used for estimates of durations, and so are the padded lengths of the prompts. Memory is planned for the
largest size (memory/largest.py) and the longest prompt alone.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from async_flowrl.config.resolution import at_size, configured, in_words
from async_flowrl.config.schema import Config
from async_flowrl.memory.largest import at_largest, prompts_with_sizes
from async_flowrl.memory.meta_model import MetaModel, build_meta_model
from async_flowrl.memory.meta_shapes import RememberedShapes
from async_flowrl.memory.peaks import velocity
from async_flowrl.memory.text_lengths import text_lengths
from async_flowrl.observability.flops import FlopCounter
from async_flowrl.types import Resolution


@dataclass(frozen=True)
class SizeCosts:
    """Sizes of training images. Both mappings have the same keys."""

    shares: Mapping[Resolution, float]
    """Size → share of the groups that have it; all shares together are 1."""
    costs: Mapping[Resolution, float]
    """Size → FLOPs of one forward pass with the mean padded prompt ÷ those of the largest size with the longest prompt.

    The largest size may be one of evaluations alone.
    """

    @property
    def mean(self) -> float:
        """Mean cost of a group in relation to one of the largest size and the longest prompt."""
        return sum(share * self.costs[size] for size, share in self.shares.items())

    def sentence(self) -> str:
        """Returns a sentence on the sizes, for estimates that are means over them and over the prompts.

        It is empty if all are alike.
        """
        if set(self.costs.values()) == {1.0}:
            return ""
        each = (f"{in_words(size)} ({share:.0%}, {self.costs[size]:.2f})" for size, share in self.shares.items())
        return (
            "memory is that of the largest images and the longest prompt; seconds are means over all sizes in px and "
            "the padded lengths of prompts (share of the groups, FLOPs in relation to the largest and longest): "
            f"{', '.join(each)}"
        )


def size_costs(config: Config) -> SizeCosts:
    """Returns the sizes of a configuration's training images. Raises ValueError as `build_meta_model`."""
    shares, most, lengths = size_shares(config), at_largest(config).rollout.resolution, text_lengths(config)
    padded = round(lengths.padded)
    if list(shares) == [most] and padded == lengths.longest:
        return SizeCosts(shares, {most: 1.0})
    model = build_meta_model(config)
    largest = _flops(at_size(config, most), model)
    model.policy.planned_tokens = padded
    return SizeCosts(shares, {size: _flops(at_size(config, size), model) / largest for size in shares})


def _flops(config: Config, model: MetaModel) -> int:
    """Returns the FLOPs of one forward pass of one image."""
    with torch.no_grad(), RememberedShapes(), FlopCounter() as counter:
        velocity(config, model, 1, "meta")
    return int(counter.total)


def size_shares(config: Config) -> dict[Resolution, float]:
    """Returns size → share of the training groups that have it, by `rollout.resolutions` and the prompts' own sizes.

    Prompts count by their weights. If the prompt file is not on this machine, only the settings count.
    """
    drawn = configured(config.rollout)
    by_prompt = _own_sizes(config)
    shares: dict[Resolution, float] = defaultdict(float)
    for size, share in by_prompt.items():
        for each in drawn if size is None else (size,):
            shares[each] += share / (len(drawn) if size is None else 1)
    return dict(shares)


def _own_sizes(config: Config) -> dict[Resolution | None, float]:
    """Returns size that training prompts bring, or None for prompts without one → share of the prompts."""
    data = prompts_with_sizes(config.data)
    if data is None or not data.train.sizes:
        return {None: 1.0}
    weights: dict[Resolution | None, float] = defaultdict(float)
    for index, prompt in enumerate(data.train):
        weights[prompt.resolution] += 1.0 if data.train.weights is None else float(data.train.weights[index])
    total = sum(weights.values())
    return {size: weight / total for size, weight in weights.items() if weight}
