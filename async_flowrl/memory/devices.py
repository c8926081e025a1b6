"""Comparison of the memory plan with the devices of a run, made before its models are loaded.

Process titles (`TRAINER`, `ROLLOUT`, `ALL`, `ONE`) name a kind
of process or several that share a device.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from async_flowrl.config.check import ConfigError
from async_flowrl.config.reward_pools import is_scoring_pool
from async_flowrl.config.schema import Config
from async_flowrl.config.sections.tune import FULL
from async_flowrl.config.shared import SHARED
from async_flowrl.memory.changes import Change, fresh_images
from async_flowrl.memory.meta_model import MetaModel, build_meta_model
from async_flowrl.memory.peaks import remembered_training_peak, sampling_peak
from async_flowrl.memory.processes import (
    MARGIN_SHARE,
    RUNTIME_BYTES,
    Footprint,
    beside,
    in_one,
    rollout_footprint,
    rollout_ranks,
    trainer_footprint,
)
from async_flowrl.memory.seats import reward_seats
from async_flowrl.memory.unplanned import or_warning
from async_flowrl.rollout.vllm_omni.settings import FAMILIES as VLLM_FAMILIES
from async_flowrl.rollout.vllm_omni.settings import MAX_RANK, spread_sizes

GIB = 2**30
MEMORY_WARNING_SHARE = 0.9
"""Share of a process's device memory above which planned memory leads to a warning."""
MAX_SETTINGS_SHOWN = 3
"""Most settings that a message names."""

TRAINER, ROLLOUT = "a trainer rank", "a rollout worker"
"""Process titles: a process of each kind alone."""
ALL = "a trainer rank with all rollout workers of its process"
"""Title of the process of the local backend, which holds the workers of both pools."""
ONE = "a process that samples and trains"
"""Title of a process of `placement=shared`."""


@dataclass(frozen=True)
class Device:
    """Memory of a device in bytes."""

    memory: int
    available: int
    """Bytes that the process may use."""


def check_devices(config: Config, memory: Mapping[str, int]) -> list[str]:
    """Returns warnings for processes whose planned memory exceeds, or nearly fills, their device.

    `memory` is pool → bytes of its smallest device; a pool that is missing is not checked. Raises ConfigError if
    weights, optimizer and versions alone exceed the device, unless `allow_oom` is set. Any other failure, such as a
    model that cannot be planned, becomes a warning, because the run may still succeed.
    """
    return or_warning("the devices' memory", lambda: compared(config, memory))


def compared(config: Config, memory: Mapping[str, int]) -> list[str]:
    """Compares like `check_devices`, but raises every failure of the planner."""
    warnings = compared_rewards(config, memory)
    memory = {pool: size for pool, size in memory.items() if not is_scoring_pool(pool)}
    model = build_meta_model(config)
    for title, device in titled_devices(config, memory).items():
        if footprint(title, config, model, device).resident > device.available:
            sentence = refusal(title, config, model, device)
            if not config.allow_oom:
                raise ConfigError(f"{sentence}; allow_oom=true tries anyway")
            warnings.append(sentence)
    if warnings:
        return warnings
    sampling, training = sampling_peak(config, model), remembered_training_peak(config)
    for title, device in titled_devices(config, memory).items():
        whole = footprint(title, config, model, device, training=training, sampling=sampling)
        if whole.total > MEMORY_WARNING_SHARE * device.available:
            warnings.append(tight(title, whole, device.available))
    return warnings


def compared_rewards(config: Config, memory: Mapping[str, int]) -> list[str]:
    """Compares like `check_devices`, only for the reward pools, with the memory that the rewards declare."""
    warnings = []
    for seat in reward_seats(config):
        if (size := memory.get(seat.pool)) is None:
            continue
        available, held = round(size * min(1.0, seat.gpus)), seat.footprint
        if held.resident > available:
            sentence = (
                f"a {seat.title} holds {held.resident / GIB:.3g} GiB of reward models, its share of a device is "
                f"{available / GIB:.3g} GiB: {seat_for(held, size, seat.key)}"
            )
            if not config.allow_oom:
                raise ConfigError(f"{sentence}; allow_oom=true tries anyway")
            warnings.append(sentence)
        elif seat.known and held.total > MEMORY_WARNING_SHARE * available:
            warnings.append(tight(f"a {seat.title}", held, available))
    return warnings


def seat_for(held: Footprint, device: int, key: str) -> str:
    """Returns a clause with the share of a device that holds a reward worker, or with the device that it needs.

    `device` is the memory of the present device in bytes, `key` the setting of the share.
    """
    if held.total > device:
        return f"it needs a whole device of {math.ceil(held.total / GIB)} GiB, with {key}=1"
    return f"it would fit with {key}={enough_gpus(held.total, device):g}"


def enough_gpus(needed: int, device: int) -> float:
    """Returns the share of a device that holds `needed` bytes, rounded up to a twentieth and at most 1.

    `device` is the memory of the device in bytes.
    """
    return min(1.0, math.ceil(20 * needed / device) / 20)


def titled_devices(config: Config, memory: Mapping[str, int]) -> dict[str, Device]:
    """Returns process title → device. A process may use its share of it, `gpus_per_worker`, at most the whole device.

    With the local backend, the workers of both pools are in one process, which may use the whole device.
    """
    if config.placement == SHARED:
        whole = min(memory.values(), default=0)
        return {ONE: Device(whole, round(whole * min(1.0, config.trainer.gpus_per_worker)))} if memory else {}
    if config.runtime.backend == "local" and len(memory) > 1:
        whole = min(memory.values())
        return {ALL: Device(whole, whole)}
    shares = {"trainer": config.trainer.gpus_per_worker, "rollout": config.rollout.gpus_per_worker}
    titles = {"trainer": TRAINER, "rollout": ROLLOUT}
    return {titles[pool]: Device(size, round(size * min(1.0, shares[pool]))) for pool, size in memory.items()}


def footprint(
    title: str, config: Config, model: MetaModel, device: Device, *, training: int = 0, sampling: int = 0
) -> Footprint:
    """Returns the planned memory of a process; `training` and `sampling` are the peak bytes of its activations."""
    trainer = trainer_footprint(config, model, training)
    rollout = rollout_footprint(config, model, sampling)
    if title == TRAINER:
        return trainer
    if title == ROLLOUT:
        return rollout
    if title == ONE:
        return in_one(trainer, rollout, full=model.full)
    return beside(trainer, rollout, config.rollout.num_workers)


def refusal(title: str, config: Config, model: MetaModel, device: Device) -> str:
    """Returns the clause for a process whose lasting parts exceed its device: their sizes, and up to three settings.

    The settings make the process fit; if no single one does, they are those that help most.
    """
    held, available = footprint(title, config, model, device), device.available
    resident = {name: size for name, size in held.parts.items() if size and name in held.lasting}
    parts = ", ".join(f"{name} {size / GIB:.3g}" for name, size in resident.items())
    left = {
        change: footprint(title, change.applied(config), scaled(change, config, model), device).resident
        for change in changes(title, config, model)
        if change.accepted(config)
    }
    smaller = sorted((change for change in left if left[change] < held.resident), key=lambda c: left[c])
    fitting = [change for change in left if left[change] <= available]
    chosen = [*fitting, *(change for change in smaller if change not in fitting)][:MAX_SETTINGS_SHOWN]
    verb = "it would fit with" if fitting else "it would need less, though not little enough, with"
    advice = ", ".join(f"{change} ({left[change] / GIB:.3g} GiB)" for change in chosen)
    return (
        f"{title} holds {held.resident / GIB:.3g} GiB of weights, optimizer and versions alone "
        f"({parts}), its device has {available / GIB:.3g} GiB; "
        + (f"{verb} {advice}" if chosen else "no single setting would make it need less")
    )


def changes(title: str, config: Config, model: MetaModel) -> Sequence[Change]:
    """Returns settings that reduce the lasting memory of a process, those that cost least speed or accuracy first."""
    trainer, rollout = config.trainer, config.rollout
    savings = []
    full = config.tune == FULL
    if title != ROLLOUT:
        savings += _shared(config)
    if title != TRAINER:
        left = {"resident": ("offload", "cached"), "offload": ("cached",), "cached": ()}[rollout.text_encoder]
        savings += [Change("rollout.text_encoder", where) for where in left]
    if title != ROLLOUT and not trainer.cpu_offload and not full:
        savings.append(Change("trainer.cpu_offload", True))
    if title != ROLLOUT and full and trainer.num_workers > 1 and trainer.shard != "full":
        savings.append(Change("trainer.num_workers", 1))  # A single rank needs no buffer for the sum of other ranks.
    if config.model.dtype == "float32":
        savings.append(Change("model.dtype", "bfloat16"))
    if config.lora.rank > 1 and not full:
        savings.append(Change("lora.rank", config.lora.rank // 2))
    if config.max_staleness > 0:
        savings.append(fresh_images(config))
    if title == ROLLOUT and not full:
        savings += _spread(config, model)
    return savings


def _spread(config: Config, model: MetaModel) -> list[Change]:
    """Returns changes that spread the network of a rollout worker over more GPUs, as far as vllm-omni can do that."""
    if model.family not in VLLM_FAMILIES or config.lora.rank > MAX_RANK:
        return []
    network: Any = model.policy.transformer
    sizes = spread_sizes(model.family, network.config).values()
    return [
        Change("rollout.engine", "vllm_omni", (Change("rollout.gpus_per_worker", gpus),))
        for gpus in (2, 4, 8)
        if gpus > rollout_ranks(config) and not any(size % gpus for size in sizes)
    ]


def _shared(config: Config) -> list[Change]:
    """Returns changes that let more trainer ranks share the base."""
    trainer, savings = config.trainer, []
    if trainer.num_workers > 1 and trainer.shard != "full" and not trainer.cpu_offload:
        savings.append(Change("trainer.shard", "full"))
    if trainer.shard != "none":
        savings.append(Change("trainer.num_workers", 2 * trainer.num_workers))
    return savings


def scaled(change: Change, config: Config, model: MetaModel) -> MetaModel:
    """Returns the model's sizes after a change, computed without building the model again."""
    if change.key == "lora.rank":
        return replace(model, adapter_parameters=model.adapter_parameters * change.value // config.lora.rank)
    if change.key != "model.dtype":
        return model
    blocks = tuple(size // 2 for size in model.block_bytes)
    return replace(
        model,
        block_bytes=blocks,
        root_bytes=model.root_bytes // 2,
        buffer_bytes=model.buffer_bytes // 2,
        itemsize=model.itemsize // 2,
    )


def tight(title: str, footprint: Footprint, available: int) -> str:
    """Returns the warning for a process that nearly fills, or exceeds, its `available` bytes."""
    parts = ", ".join(f"{name} {size / GIB:.3g}" for name, size in footprint.parts.items() if size)
    runtime = RUNTIME_BYTES / GIB
    return (
        f"{title} is planned to need {footprint.total / GIB:.3g} of its device's {available / GIB:.3g} GiB "
        f"({footprint.total / available:.0%}: {parts}, margin {MARGIN_SHARE:.0%} and {runtime:.3g} of runtime): it may "
        "run out of memory"
    )
