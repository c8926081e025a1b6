"""Memory of activations, by a rehearsal of a configuration's workers on fake tensors; importing it loads no model."""

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from async_flowrl.config.error_text import quieter
from async_flowrl.config.schema import Config

if TYPE_CHECKING:
    from async_flowrl.memory.model_sizes import Sizes
    from async_flowrl.memory.rehearsal.model import FakeModel
    from async_flowrl.memory.rehearsal.phases import Phase
    from async_flowrl.memory.rehearsal.rank import RankRehearsal
    from async_flowrl.memory.rehearsal.rollout import RolloutRehearsal

_remembered: dict[str, Any] = {}


def alone(config: Config) -> Config:
    """Returns the configuration with a lone trainer rank that holds everything, without what cannot be rehearsed."""
    one_rank: dict[str, Any] = {"num_workers": 1, "workers_per_node": None, "cpu_offload": False, "compile": False}
    trainer = replace(config.trainer, shard="none", shard_size=None, **one_rank)
    return replace(
        config,
        trainer=trainer,
        rollout=replace(config.rollout, engine="diffusers", compile=False),
        lora=replace(config.lora, path=None),
        placement="separate",
        runtime=replace(config.runtime, numa_binding=False),
    )


def rehearsed_rank(config: Config) -> "RankRehearsal":
    """Returns a lone trainer rank, rehearsed once per configuration. ValueError for an unknown architecture."""
    return _once(alone(config), "trainer", whole_rank)  # type: ignore[no-any-return]


def rehearsed_rollout(config: Config) -> "RolloutRehearsal":
    """Returns a rollout worker with a few of the blocks, rehearsed once; raises as `rehearsed_rank`."""
    # Without gradients its activations are those of one block.
    return _once(alone(config), "rollout", short_rollout)  # type: ignore[no-any-return]


def model_sizes(config: Config) -> "Sizes":
    """Returns the sizes of the configuration's model without its VAE. Raises ValueError as `rehearsed_rank`."""
    from async_flowrl.memory.rehearsal.model import architecture

    key = f"sizes {architecture(config)} {config.model!r} {config.lora!r} {config.tune} {config.full!r}"
    if key not in _remembered:
        _remembered[key] = rehearsed_rank(config).sizes
    return cast("Sizes", _remembered[key])


def _once(config: Config, side: str, rehearse: Callable[..., Any]) -> Any:
    from async_flowrl.memory.rehearsal.model import FakeModel

    model = FakeModel.of(config)
    key = f"{side} {model.known} {model.prompts.longest} {model.prompts.images} {config!r}"
    if key not in _remembered:
        # The package's warnings are about values, and fake tensors have none.
        with quieter("async_flowrl", logging.ERROR):
            _remembered[key] = rehearse(config, model)
    return _remembered[key]


def training_peak(config: Config) -> int:
    return _peak(rehearsed_rank(config).phases)


def sampling_bytes(config: Config) -> int:
    """Returns the most bytes that a rollout worker holds beside its weights and versions."""
    phases = rehearsed_rollout(config).phases
    return _peak(phases) - phases["sample"].resident


def _peak(phases: "Mapping[str, Phase]") -> int:
    return max(phase.peak for name, phase in phases.items() if name != "load")


T = TypeVar("T")
# Blocks of a stack that are rehearsed at least: the last block of a network may have less in it than the others.
FEWEST = 2
# From so many chunks of a ticket on, besides the first, each is taken to be whole and to leave as much as the second.
MANY_CHUNKS = 4
# Blocks that FSDP2 holds whole at once: the one that computes, the next one, and the buffer it is gathered in.
GATHERED_BLOCKS = 3
_NUMBER = re.compile(r"\d[].*?]")  # Part of a pattern of tensor names that may name single blocks.


def whole_rank(config: Config, model: "FakeModel") -> "RankRehearsal":
    from async_flowrl.memory.rehearsal.rank import rehearse_trainer

    trainer = config.trainer
    sharded = trainer.num_workers > 1 and config.is_sharded
    how = trainer.gradient_checkpointing
    period = int(how.removeprefix("every_")) if how.startswith("every_") else 1
    fewest = GATHERED_BLOCKS + 1 + trainer.prefetch if sharded else FEWEST
    return _whole(config, model, fewest, period, lambda part: rehearse_trainer(config, part))


def whole_rollout(config: Config, model: "FakeModel") -> "RolloutRehearsal":
    from async_flowrl.memory.rehearsal.rollout import rehearse_rollout

    return _whole(config, model, FEWEST, 1, lambda part: rehearse_rollout(config, part))


def short_rollout(config: Config, model: "FakeModel") -> "RolloutRehearsal":
    from async_flowrl.memory.rehearsal.rollout import rehearse_rollout

    ((_, short), *_) = model.shortened(FEWEST, 1)
    rows = config.rollout.batch_size or config.images_per_ticket
    more = -(-config.images_per_ticket // rows) - 1
    if more < MANY_CHUNKS:
        return rehearse_rollout(config, short)
    one, two = (rehearse_rollout(replace(config, ticket_size=rows * chunks), short) for chunks in (1, 2))
    return cast("RolloutRehearsal", summed([1 - more, more], [one, two]))


def _whole(config: Config, model: "FakeModel", fewest: int, period: int, rehearse: Callable[["FakeModel"], T]) -> T:
    patterns = [*config.full.freeze, *(config.lora.targets or ())]
    if any(_NUMBER.search(pattern) for pattern in patterns):  # Some blocks are trained, others are not.
        return rehearse(model)
    parts = model.shortened(fewest, period)
    return cast("T", summed([weight for weight, _ in parts], [rehearse(part) for _, part in parts]))


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
        by_field = {field.name: [getattr(value, field.name) for value in values] for field in fields(first)}
        return replace(first, **{name: summed(weights, of) for name, of in by_field.items()})
    return first
