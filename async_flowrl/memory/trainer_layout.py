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
from async_flowrl.training.messages import Layout

logger = logging.getLogger(__name__)

AUTO = "auto"
# Values of `trainer.gradient_checkpointing`, from the one that needs most memory to the one that needs least.
CHECKPOINTED = ("none", "every_4", "every_3", "every_2", "full")


def resolved(config: Config, memory: Mapping[str, int]) -> tuple[Config, str]:
    """Returns the configuration with `auto` in the layout replaced by the cheapest values that fit into the devices.

    With it, a sentence that says what `auto` means and why; empty if no setting is `auto`. `memory` is pool → bytes of
    its smallest device. Cheapest is the whole base on each rank with as few checkpointed blocks as possible. If none
    fits, or the model cannot be planned, it is the one that needs least memory.
    """
    layouts, named = candidates(config), Layout.named(config.trainer)
    if layouts == [named]:
        return config, ""
    try:
        layout, why = fitting(config, layouts, memory)
    except Exception as error:  # The run may start even if the planner cannot plan its model.
        logger.info("no plan of the trainer's layout", exc_info=True)
        layout = layouts[-1]
        why = f"the model cannot be rehearsed ({type(error).__name__}: {error}), and this needs least memory"
    auto = [key for key in ("shard", "gradient_checkpointing") if getattr(layout, key) != getattr(named, key)]
    values = " and ".join(f"trainer.{key}=auto is {getattr(layout, key)}" for key in auto)
    return with_layout(config, layout), f"{values}: {why}"


def resolved_on(config: Config, device_bytes: int) -> tuple[Config, str]:
    """As `resolved`, on devices of so many bytes for the trainer and the rollout pool, if they have GPUs."""
    gpus_of = {TRAINER: config.trainer.gpus_per_worker, ROLLOUT: config.rollout.gpus_per_worker}
    return resolved(config, {pool: device_bytes for pool, gpus in gpus_of.items() if gpus > 0})


def with_layout(config: Config, layout: Layout) -> Config:
    return replace(config, trainer=layout.applied(config.trainer))


def fitting(config: Config, layouts: Sequence[Layout], memory: Mapping[str, int]) -> tuple[Layout, str]:
    """Returns the first layout that fits, else the one that needs least, and why. Raises the planner's errors."""
    if TRAINER not in memory:
        return layouts[0], "the trainer has no GPU whose memory it could save"
    tried: list[tuple[Layout, int]] = []
    for layout in layouts:
        process = next(processes(with_layout(config, layout), [TRAINER]))
        available = process.available(device_of(process, memory))
        tried.append((layout, process.footprint.total))
        if tried[-1][1] <= MEMORY_WARNING_SHARE * available:
            break
    layout, total = min(tried, key=lambda one: one[1])
    needs = f"a {process.title} is planned to need {total / GIB:.3g} of {available / GIB:.3g} GiB, activations included"
    return layout, needs if total <= MEMORY_WARNING_SHARE * available else f"nothing fits; with this, {needs}"


def candidates(config: Config) -> list[Layout]:
    """Returns the layouts to try, the cheapest first; the configured one alone if no setting is `auto`."""
    trainer, named = config.trainer, Layout.named(config.trainer)
    shards: list[tuple[str, int | None]] = [(named.shard, named.shard_size)]
    separate = len(placement_of(config).pools) > 1
    if trainer.shard == AUTO and trainer.num_workers > 1 and not trainer.cpu_offload and separate:
        per_node = trainer.workers_per_node if not tuning_of(config).whole else None
        hybrid = per_node is not None and 1 < per_node < trainer.num_workers
        shards = [("none", named.shard_size), ("hybrid", per_node) if hybrid else ("full", named.shard_size)]
    checkpointed = CHECKPOINTED if named.gradient_checkpointing == AUTO else (named.gradient_checkpointing,)
    return [Layout(shard, size, how) for shard, size in shards for how in checkpointed]
