"""Rehearsal of a whole model from rehearsals of a few of its blocks: blocks that are alike count alike.

Weights, kernels and collectives are linear in the number of blocks, and so is the peak of each phase.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

from async_flowrl.config.schema import Config
from async_flowrl.memory.rehearsal.model import FakeModel
from async_flowrl.memory.rehearsal.rollout import RolloutRehearsal, rehearse_rollout
from async_flowrl.memory.rehearsal.trainer import RankRehearsal, rehearse_trainer

T = TypeVar("T")
FEWEST = 2
"""Blocks of a stack that are rehearsed at least: the last block of a network may have less in it than the others."""
GATHERED = 3
"""Blocks that FSDP2 holds whole at once: the one that computes, the next one, and the buffer it is gathered in."""
_NUMBER = re.compile(r"\d[].*?]")
"""Part of a pattern of tensor names that may name single blocks."""


def whole_rank(config: Config, model: FakeModel, *, kernels: bool = True) -> RankRehearsal:
    """Returns the rehearsal of a trainer rank (see `rehearse_trainer`) with all blocks of the model."""
    trainer = config.trainer
    sharded = trainer.num_workers > 1 and config.is_sharded
    how = trainer.gradient_checkpointing
    period = int(how.removeprefix("every_")) if how.startswith("every_") else 1
    fewest = GATHERED + 1 + trainer.prefetch if sharded else FEWEST
    return _whole(config, model, fewest, period, lambda each: rehearse_trainer(config, each, kernels=kernels))


def whole_rollout(config: Config, model: FakeModel, *, kernels: bool = True) -> RolloutRehearsal:
    """Returns the rehearsal of a rollout worker (see `rehearse_rollout`) with all blocks of the model."""
    return _whole(config, model, FEWEST, 1, lambda each: rehearse_rollout(config, each, kernels=kernels))


def short_rollout(config: Config, model: FakeModel, *, kernels: bool) -> RolloutRehearsal:
    """Returns the rehearsal of a rollout worker that has only a few of the blocks."""
    ((_, short), *_) = model.shortened(FEWEST, 1)
    return rehearse_rollout(config, short, kernels=kernels)


def _whole(config: Config, model: FakeModel, fewest: int, period: int, rehearse: Callable[[FakeModel], T]) -> T:
    patterns = [*config.full.freeze, *(config.lora.targets or ())]
    if any(_NUMBER.search(pattern) for pattern in patterns):  # Some blocks are trained, others are not.
        return rehearse(model)
    parts = model.shortened(fewest, period)
    return cast("T", summed([weight for weight, _ in parts], [rehearse(each) for _, each in parts]))


def summed(weights: Sequence[int], values: Sequence[Any]) -> Any:
    """Returns the weighted sum of numbers, of all numbers in mappings and dataclasses, or else the first value."""
    first = values[0]
    if isinstance(first, int | float) and not isinstance(first, bool):
        return sum(weight * value for weight, value in zip(weights, values, strict=True))
    if isinstance(first, Counter):
        keys = {key for value in values for key in value}
        return Counter({key: summed(weights, [value[key] for value in values]) for key in keys})
    if isinstance(first, Mapping):
        return {key: summed(weights, [value[key] for value in values]) for key in first}
    if is_dataclass(first) and not isinstance(first, type):
        own = {field.name: [getattr(value, field.name) for value in values] for field in fields(first)}
        return replace(first, **{name: summed(weights, of) for name, of in own.items()})
    return first
