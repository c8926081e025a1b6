"""Memory of a configuration's activations, by a rehearsal of its workers on fake tensors; importing it loads no model.

A process remembers what it has rehearsed, by configuration.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from async_flowrl.config.messages import quieter
from async_flowrl.config.schema import Config

if TYPE_CHECKING:
    from async_flowrl.memory.rehearsal.ledger import Phase
    from async_flowrl.memory.rehearsal.rollout import RolloutRehearsal
    from async_flowrl.memory.rehearsal.trainer import RankRehearsal
    from async_flowrl.memory.sizes import Sizes

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
    """Returns a lone trainer rank, as it is rehearsed or was before.

    Raises ValueError if the model's architecture is not known.
    """
    from async_flowrl.memory.rehearsal.whole import whole_rank

    return _once(alone(config), "trainer", whole_rank)  # type: ignore[no-any-return]


def rehearsed_rollout(config: Config) -> "RolloutRehearsal":
    """Returns a rollout worker with a few of the blocks, as it is rehearsed or was before.

    Without gradients its activations are those of one block. Raises ValueError as `rehearsed_rank`.
    """
    from async_flowrl.memory.rehearsal.whole import short_rollout

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
    key = f"{side} {model.known} {model.planned_tokens} {config!r}"
    if key not in _remembered:
        # The package's warnings are about values, and fake tensors have none.
        with quieter("async_flowrl", logging.ERROR):
            _remembered[key] = rehearse(config, model, kernels=False)
    return _remembered[key]


def training_peak(config: Config) -> int:
    """Returns the most bytes that a lone trainer rank holds after it was loaded."""
    return _peak(rehearsed_rank(config).phases)


def sampling_bytes(config: Config) -> int:
    """Returns the most bytes that a rollout worker holds beside its weights and versions."""
    phases = rehearsed_rollout(config).phases
    return _peak(phases) - phases["sample"].resident


def _peak(phases: "Mapping[str, Phase]") -> int:
    return max(phase.peak for name, phase in phases.items() if name != "load")
