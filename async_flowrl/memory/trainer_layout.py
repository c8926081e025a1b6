"""The choice of the trainer's layout on given devices if `trainer.shard` or `trainer.gradient_checkpointing` is `auto`.

Plan, rehearsal and run all call `resolved`, so a plan counts what the run does. With deterministic kernels the
choice does not change a bit of the weights, except that of `shard` with tune=full.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from async_flowrl.config.placement import placement_of
from async_flowrl.config.schema import Config
from async_flowrl.config.scoring_pools import ROLLOUT, TRAINER
from async_flowrl.memory.devices import MEMORY_WARNING_SHARE, device_of, processes
from async_flowrl.memory.footprints import GIB
from async_flowrl.policies.tuning import tuning_of

logger = logging.getLogger(__name__)

AUTO = "auto"
LAYOUT = ("shard", "shard_size", "gradient_checkpointing")  # Settings of `trainer` that are its layout.
# Values of `trainer.gradient_checkpointing`, from the one that needs most memory to the one that needs least.
CHECKPOINTED = ("none", "every_4", "every_3", "every_2", "full")


def resolved(config: Config, memory: Mapping[str, int]) -> tuple[Config, str]:
    """Returns the configuration with `auto` in the layout replaced by the cheapest values that fit into the devices.

    With it, a sentence that says what `auto` means and why; empty if no setting is `auto`. `memory` is pool → bytes of
    its smallest device. Cheapest is the whole base on each rank with as few checkpointed blocks as possible. If none
    fits, or the model cannot be planned, it is the one that needs least memory.
    """
    possible = candidates(config)
    if possible == [config]:
        return config, ""
    try:
        chosen, why = fitting(possible, memory)
    except Exception as error:  # The run may start even if the planner cannot plan its model.
        logger.info("no plan of the trainer's layout", exc_info=True)
        chosen = possible[-1]
        why = f"the model cannot be rehearsed ({type(error).__name__}: {error}), and this needs least memory"
    before, now = config.trainer, chosen.trainer
    auto = [key for key in ("shard", "gradient_checkpointing") if getattr(now, key) != getattr(before, key)]
    values = " and ".join(f"trainer.{key}=auto is {getattr(now, key)}" for key in auto)
    return chosen, f"{values}: {why}"


def resolved_on(config: Config, device_bytes: int) -> tuple[Config, str]:
    """As `resolved`, on devices of so many bytes for the trainer and the rollout pool, if they have GPUs."""
    gpus_of = {TRAINER: config.trainer.gpus_per_worker, ROLLOUT: config.rollout.gpus_per_worker}
    return resolved(config, {pool: device_bytes for pool, gpus in gpus_of.items() if gpus > 0})


def fitting(possible: Sequence[Config], memory: Mapping[str, int]) -> tuple[Config, str]:
    """Returns the first configuration that fits, else that which needs least, and why. Raises the planner's errors."""
    if TRAINER not in memory:
        return possible[0], "the trainer has no GPU whose memory it could save"
    tried: list[tuple[Config, int]] = []
    for config in possible:
        process = next(processes(config, [TRAINER]))
        available = process.available(device_of(process, memory))
        tried.append((config, process.footprint.total))
        if tried[-1][1] <= MEMORY_WARNING_SHARE * available:
            break
    chosen, total = min(tried, key=lambda one: one[1])
    needs = f"a {process.title} is planned to need {total / GIB:.3g} of {available / GIB:.3g} GiB, activations included"
    return chosen, needs if total <= MEMORY_WARNING_SHARE * available else f"nothing fits; with this, {needs}"


def candidates(config: Config) -> list[Config]:
    """Returns the configurations to try, the cheapest first; this one alone if no setting is `auto`."""
    trainer = config.trainer
    shards: list[tuple[str, int | None]] = [(trainer.shard, trainer.shard_size)]
    shares = len(placement_of(config).pools) > 1 and not trainer.cpu_offload and config.model.quantize is None
    if trainer.shard == AUTO and trainer.num_workers > 1 and shares:
        per_node = trainer.workers_per_node if not tuning_of(config).whole else None
        hybrid = per_node is not None and 1 < per_node < trainer.num_workers
        shards = [("none", trainer.shard_size), ("hybrid", per_node) if hybrid else ("full", trainer.shard_size)]
    checkpointed = CHECKPOINTED if trainer.gradient_checkpointing == AUTO else (trainer.gradient_checkpointing,)
    settings = [
        replace(trainer, shard=shard, shard_size=size, gradient_checkpointing=how)
        for shard, size in shards
        for how in checkpointed
    ]
    return [replace(config, trainer=each) for each in settings]
