"""The choice of the trainer's layout on given devices if `trainer.shard` or `trainer.gradient_checkpointing` is `auto`.

Plan, rehearsal, doctor and run all call `resolved`, so a plan counts what the run does. If the kernels are
deterministic, the choice does not change a bit of the weights, except that with tune=full the choice of `shard` does.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from async_flowrl.config.placement import placement_of
from async_flowrl.config.pools import TRAINER
from async_flowrl.config.schema import Config
from async_flowrl.memory.devices import MEMORY_WARNING_SHARE, device_of, processes
from async_flowrl.memory.processes import GIB
from async_flowrl.policies.tuning import tuning_of
from async_flowrl.training.messages import Layout

logger = logging.getLogger(__name__)

AUTO = "auto"
# Values of `trainer.gradient_checkpointing`, from the one that needs most memory to the one that needs least.
CHECKPOINTED = ("none", "every_4", "every_3", "every_2", "full")
SHARD, CHECKPOINTING = "trainer.shard", "trainer.gradient_checkpointing"  # The settings that may be `auto`.


@dataclass(frozen=True)
class Chosen:
    """A layout of the trainer."""

    layout: Layout
    # One sentence that says what `auto` means in it and why; empty if no setting is `auto`.
    reasons: tuple[str, ...] = ()

    def applied(self, config: Config) -> Config:
        """Returns a copy of the configuration with this layout in its trainer settings."""
        return replace(config, trainer=self.layout.applied(config.trainer))


def resolved(config: Config, memory: Mapping[str, int]) -> Chosen:
    """Returns the configured layout, with `auto` replaced by the cheapest values that fit into the devices.

    `memory` is pool → bytes of its smallest device; a pool without a device is missing. The cheapest layout is that
    each rank holds the whole base, with as few checkpointed blocks as possible: it needs no communication, and the
    death of a rank costs least. Next come layouts in which ranks share the base. If no layout fits, or if the model
    cannot be planned, the one that needs least memory is chosen, and the reason says so.
    """
    asked = _asked(config)
    if not asked:
        return Chosen(Layout.named(config.trainer))
    if "trainer" not in memory:
        return _chosen(_filled(config, "none", "none"), asked, "the trainer has no GPU whose memory it could save")
    try:
        layout, why = fitting(config, memory)
        return _chosen(layout, asked, why)
    except Exception as error:  # The run may start even if the planner cannot plan its model.
        logger.info("no plan of the trainer's layout", exc_info=True)
        why = f"the model cannot be rehearsed ({type(error).__name__}: {error}), and this needs least memory"
        return _chosen(_filled(config, _shared(config), "full"), asked, why)


def fitting(config: Config, memory: Mapping[str, int]) -> tuple[Layout, str]:
    """Tries the candidates in order and returns the first that fits, else the one that needs least memory, and why.

    `memory` is pool → bytes of its smallest device. A layout fits if its planned memory, activations included, is at
    most MEMORY_WARNING_SHARE of the device. Raises the errors of the planner.
    """
    tried: list[tuple[Layout, int]] = []
    for layout in candidates(config):
        process = next(processes(Chosen(layout).applied(config), [TRAINER]))
        available = process.available(device_of(process, memory))
        tried.append((layout, process.footprint.total))
        if tried[-1][1] <= MEMORY_WARNING_SHARE * available:
            break
    layout, total = min(tried, key=lambda one: one[1])
    return layout, _why(f"a {process.title}", tried, layout, total, available)


def _why(title: str, tried: list[tuple[Layout, int]], layout: Layout, total: int, available: int) -> str:
    """Returns in words the planned memory of the chosen layout, and of the next cheaper one, which does not fit."""
    needs = f"{title} is planned to need {total / GIB:.3g} of {available / GIB:.3g} GiB, activations included"
    dearer = [one for one in tried if one[0] != layout]
    if total > MEMORY_WARNING_SHARE * available:
        return f"nothing fits; with this, {needs}"
    if not dearer:
        return f"the cheapest fits: {needs}"
    before, size = dearer[-1]
    return f"{needs}; {before.in_words()} would need {size / GIB:.3g} GiB"


def on_devices(config: Config, device_bytes: int) -> dict[str, int]:
    """Returns pool → `device_bytes`, for the trainer and the rollout pool if they have GPUs by the configuration."""
    asked = {"trainer": config.trainer.gpus_per_worker, "rollout": config.rollout.gpus_per_worker}
    return {pool: device_bytes for pool, gpus in asked.items() if gpus > 0}


def _asked(config: Config) -> list[str]:
    """Returns the settings that are `auto` and make a difference."""
    trainer = config.trainer
    free = trainer.num_workers > 1 and not trainer.cpu_offload and not placement_of(config).together
    settings = [SHARD] if trainer.shard == AUTO and free else []
    return settings + ([CHECKPOINTING] if trainer.gradient_checkpointing == AUTO else [])


def candidates(config: Config) -> Iterator[Layout]:
    """Yields the layouts to try, the cheapest first."""
    asked = _asked(config)
    for shard in ("none", _shared(config)) if SHARD in asked else ("",):
        for how in CHECKPOINTED if CHECKPOINTING in asked else ("",):
            yield _filled(config, shard, how)


def _chosen(layout: Layout, asked: list[str], why: str) -> Chosen:
    """Returns the layout with its reason: the value of each setting that is `auto`, and `why`."""
    values = {SHARD: layout.in_shard(), CHECKPOINTING: layout.gradient_checkpointing}
    return Chosen(layout, (f"{' and '.join(f'{key}=auto is {values[key]}' for key in asked)}: {why}",))


def _shared(config: Config) -> str:
    """Returns how ranks share the base: within a node if the number of ranks per node is known, else over all ranks."""
    per_node = config.trainer.workers_per_node if not tuning_of(config).whole else None
    return "hybrid" if per_node is not None and 1 < per_node < config.trainer.num_workers else "full"


def _filled(config: Config, shard: str, how: str) -> Layout:
    """Returns the configuration's layout with these values in place of each `auto` that makes a difference."""
    layout, asked = Layout.named(config.trainer), _asked(config)
    if SHARD in asked:
        size = config.trainer.workers_per_node if shard == "hybrid" else layout.shard_size
        layout = replace(layout, shard=shard, shard_size=size)
    return replace(layout, gradient_checkpointing=how) if CHECKPOINTING in asked else layout
