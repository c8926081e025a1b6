"""The choice of the trainer's layout on given devices if `trainer.shard` or `trainer.gradient_checkpointing` is `auto`.

Plan, rehearsal, doctor and run all call `resolved`, so a plan counts what the run does. With deterministic kernels the
choice does not change a bit of the weights, except that of `shard` with tune=full.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from async_flowrl.config.placement import placement_of
from async_flowrl.config.pools import TRAINER
from async_flowrl.config.schema import Config
from async_flowrl.memory.devices import MEMORY_WARNING_SHARE, device_of, processes
from async_flowrl.memory.footprints import GIB
from async_flowrl.policies.tuning import tuning_of
from async_flowrl.training.messages import Layout

logger = logging.getLogger(__name__)

AUTO = "auto"
# Values of `trainer.gradient_checkpointing`, from the one that needs most memory to the one that needs least.
CHECKPOINTED = ("none", "every_4", "every_3", "every_2", "full")
SHARD, CHECKPOINTING = "trainer.shard", "trainer.gradient_checkpointing"  # The settings that may be `auto`.


@dataclass(frozen=True)
class Chosen:
    layout: Layout
    reason: str = ""  # Sentence that says what `auto` means in it and why; empty if no setting is `auto`.

    def applied(self, config: Config) -> Config:
        return replace(config, trainer=self.layout.applied(config.trainer))


def resolved(config: Config, memory: Mapping[str, int]) -> Chosen:
    """Returns the configured layout, with `auto` replaced by the cheapest values that fit into the devices.

    `memory` is pool → bytes of its smallest device; a pool without a device is missing. Cheapest is the whole base on
    each rank with as few checkpointed blocks as possible: it needs no communication, and the death of a rank costs
    least. If no layout fits, or the model cannot be planned, the one that needs least memory is chosen, with that
    reason.
    """
    settings = _auto_settings(config)
    if not settings:
        return Chosen(Layout.named(config.trainer))
    if "trainer" not in memory:
        return _chosen(_filled(config, "none", "none"), settings, "the trainer has no GPU whose memory it could save")
    try:
        layout, why = fitting(config, memory)
        return _chosen(layout, settings, why)
    except Exception as error:  # The run may start even if the planner cannot plan its model.
        logger.info("no plan of the trainer's layout", exc_info=True)
        why = f"the model cannot be rehearsed ({type(error).__name__}: {error}), and this needs least memory"
        return _chosen(_filled(config, _sharded_mode(config), "full"), settings, why)


def fitting(config: Config, memory: Mapping[str, int]) -> tuple[Layout, str]:
    """Returns the first candidate that fits, else the one that needs least, and why. Raises the planner's errors.

    `memory` is pool → bytes of its smallest device. A layout fits if its planned memory, activations included, is at
    most MEMORY_WARNING_SHARE of the device.
    """
    tried: list[tuple[Layout, int]] = []
    for layout in candidates(config):
        process = next(processes(Chosen(layout).applied(config), [TRAINER]))
        available = process.available(device_of(process, memory))
        tried.append((layout, process.footprint.total))
        if tried[-1][1] <= MEMORY_WARNING_SHARE * available:
            break
    layout, total = min(tried, key=lambda one: one[1])
    needs = f"a {process.title} is planned to need {total / GIB:.3g} of {available / GIB:.3g} GiB, activations included"
    return layout, needs if total <= MEMORY_WARNING_SHARE * available else f"nothing fits; with this, {needs}"


def on_devices(config: Config, device_bytes: int) -> dict[str, int]:
    """Returns pool → `device_bytes`, for the trainer and the rollout pool if they have GPUs by the configuration."""
    gpus_of = {"trainer": config.trainer.gpus_per_worker, "rollout": config.rollout.gpus_per_worker}
    return {pool: device_bytes for pool, gpus in gpus_of.items() if gpus > 0}


def _auto_settings(config: Config) -> list[str]:
    trainer = config.trainer
    free = trainer.num_workers > 1 and not trainer.cpu_offload and len(placement_of(config).pools) > 1
    settings = [SHARD] if trainer.shard == AUTO and free else []
    return settings + ([CHECKPOINTING] if trainer.gradient_checkpointing == AUTO else [])


def candidates(config: Config) -> Iterator[Layout]:
    """Yields the layouts to try, the cheapest first."""
    settings = _auto_settings(config)
    for shard in ("none", _sharded_mode(config)) if SHARD in settings else ("",):
        for how in CHECKPOINTED if CHECKPOINTING in settings else ("",):
            yield _filled(config, shard, how)


def _chosen(layout: Layout, settings: list[str], why: str) -> Chosen:
    values = {SHARD: layout.shard, CHECKPOINTING: layout.gradient_checkpointing}
    return Chosen(layout, f"{' and '.join(f'{key}=auto is {values[key]}' for key in settings)}: {why}")


def _sharded_mode(config: Config) -> str:
    per_node = config.trainer.workers_per_node if not tuning_of(config).whole else None
    return "hybrid" if per_node is not None and 1 < per_node < config.trainer.num_workers else "full"


def _filled(config: Config, shard: str, how: str) -> Layout:
    layout, settings = Layout.named(config.trainer), _auto_settings(config)
    if SHARD in settings:
        size = config.trainer.workers_per_node if shard == "hybrid" else layout.shard_size
        layout = replace(layout, shard=shard, shard_size=size)
    return replace(layout, gradient_checkpointing=how) if CHECKPOINTING in settings else layout
