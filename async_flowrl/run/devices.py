"""Checks of the devices' memory before models are loaded, and the choice of the trainer's layout; for run/job.py."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace

from async_flowrl.config.pools import ROLLOUT, TRAINER, is_scoring_pool, scoring_pools
from async_flowrl.config.schema import Config
from async_flowrl.controller.trainer import TrainerGroup
from async_flowrl.memory.devices import check_devices
from async_flowrl.memory.layout import resolved
from async_flowrl.observability.terminal import named_lines, say
from async_flowrl.run.prepare import Prepared
from separation.group import WorkerGroup
from separation.supervise import deadline

logger = logging.getLogger(__name__)


async def compare_devices(config: Config, memory: Mapping[str, int]) -> None:
    """Compares the devices' bytes with the plan: warnings in the log, or ConfigError if a device is too small."""
    if memory:
        for sentence in await asyncio.to_thread(check_devices, config, memory):
            logger.warning("%s", sentence)


async def lay_out(
    prepared: Prepared, groups: Mapping[str, WorkerGroup], trainers: TrainerGroup
) -> tuple[Prepared, dict[str, int]]:
    """Decides what `auto` means in the settings of the trainer's layout, and tells the ranks' TrainerGroup.

    Returns the run with the chosen settings, and pool → bytes of memory of its smallest device.
    """
    config = prepared.config
    async with deadline(config.deadlines.load, "load: memory of the devices"):
        memory = await device_memory(config, groups)
    chosen = await asyncio.to_thread(resolved, prepared.at_largest, memory)
    trainers.layout = chosen.layout
    for sentence in chosen.reasons:
        logger.info("%s", sentence)
    if chosen.reasons and config.console != "quiet":
        say(named_lines([("layout", sentence) for sentence in chosen.reasons], 10))
    settled = replace(config, trainer=chosen.layout.applied(config.trainer))
    return replace(prepared, config=settled), memory


async def device_memory(config: Config, groups: Mapping[str, WorkerGroup]) -> dict[str, int]:
    """Returns pool → bytes of memory of its smallest device, for the pools that have devices."""
    # Rollout workers of vllm_omni are left out, because they start CUDA in processes of their own and plan their memory
    # themselves.
    gpus_of = {TRAINER: config.trainer.gpus_per_worker, ROLLOUT: config.rollout.gpus_per_worker}
    gpus_of |= {pool.name: pool.gpus_per_worker for pool in scoring_pools(config)}
    if config.rollout.engine == "vllm_omni":
        del gpus_of[ROLLOUT]
    memory: dict[str, int] = {}
    for pool in (name for name, gpus in gpus_of.items() if gpus > 0):
        lane = "main" if is_scoring_pool(pool) else "control"
        calls = (
            worker.call("async_flowrl.observability.flops:total_memory", lane=lane) for worker in groups[pool].workers
        )
        sizes = [size for size in await asyncio.gather(*calls) if size is not None]
        if sizes:
            memory[pool] = min(sizes)
    return memory
