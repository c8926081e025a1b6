"""Comparison of the memory plan with the devices of a run, made before its models are loaded.

Process titles (`TRAINER`, `ROLLOUT`, `ALL`, `ONE`) name a kind
of process or several that share a device.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from async_flowrl.config.check import ConfigError
from async_flowrl.config.pools import is_scoring_pool
from async_flowrl.config.schema import FULL, SHARED, Config
from async_flowrl.memory.changes import Change, best, fresh_images
from async_flowrl.memory.processes import (
    MARGIN_SHARE,
    RUNTIME_BYTES,
    Footprint,
    beside,
    in_one,
    lasting_rollout,
    lasting_trainer,
    planned_rollout,
    planned_trainer,
)
from async_flowrl.memory.seats import reward_seats

logger = logging.getLogger(__name__)

GIB = 2**30
MEMORY_WARNING_SHARE = 0.9
"""Share of a process's device memory above which planned memory leads to a warning."""

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
    model that cannot be rehearsed, becomes a warning, because the run may still succeed.
    """
    try:
        warnings = compared_rewards(config, memory)
        pools = {pool: size for pool, size in memory.items() if not is_scoring_pool(pool)}
        for title, device in titled_devices(config, pools).items():
            warnings += compared(title, config, device)
    except ConfigError:
        raise
    except Exception as error:
        logger.info("no plan of the devices' memory", exc_info=True)
        return [f"the devices' memory was not compared with a plan: {type(error).__name__}: {error}"]
    return warnings


def compared(title: str, config: Config, device: Device) -> list[str]:
    """Compares like `check_devices`, for one kind of process; raises every failure of the planner."""
    if footprint(title, config, lasting=True).resident > device.available:
        sentence = refusal(title, config, device)
        if not config.allow_oom:
            raise ConfigError(f"{sentence}; allow_oom=true tries anyway")
        return [sentence]
    whole = footprint(title, config)
    return [tight(title, whole, device.available)] if whole.total > MEMORY_WARNING_SHARE * device.available else []


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


def footprint(title: str, config: Config, *, lasting: bool = False) -> Footprint:
    """Returns the planned memory of a process; `lasting` leaves out activations. Raises as `plan_memory`."""
    of_trainer, of_rollout = (lasting_trainer, lasting_rollout) if lasting else (planned_trainer, planned_rollout)
    if title == TRAINER:
        return of_trainer(config)
    if title == ROLLOUT:
        return of_rollout(config)
    if title == ONE:
        return in_one(of_trainer(config), of_rollout(config), full=config.tune == FULL)
    return beside(of_trainer(config), of_rollout(config), config.rollout.num_workers)


def refusal(title: str, config: Config, device: Device) -> str:
    """Returns the clause for a process whose lasting parts exceed its device: their sizes, and what would help."""
    held, available = footprint(title, config, lasting=True), device.available
    resident = {name: size for name, size in held.parts.items() if size and name in held.lasting}
    parts = ", ".join(f"{name} {size / GIB:.3g}" for name, size in resident.items())
    return (
        f"{title} holds {held.resident / GIB:.3g} GiB of weights, optimizer and versions alone "
        f"({parts}), its device has {available / GIB:.3g} GiB; {remedy(title, config, device, lasting=True)}"
    )


def remedy(title: str, config: Config, device: Device, *, lasting: bool = False) -> str:
    """Returns a clause with a setting that makes a process fit its device, or else the one that saves most.

    `lasting` leaves out activations, and settings that only they depend on. Otherwise settings that reduce what lasts
    are taken to leave activations as they are.
    """

    def resident(changed: Config) -> int:
        return footprint(title, changed, lasting=True).resident

    def total(changed: Config) -> int:
        return footprint(title, changed).total

    remedies: list[tuple[str, int] | None] = []
    if lasting:
        remedies.append(best(lasting_changes(title, config), config, resident, device.available))
    else:
        remedies.append(best(passing_changes(title, config), config, total, device.available))
        if remedies[0] is None or remedies[0][1] > device.available:
            beside = total(config) - resident(config)
            remedies.append(
                best(lasting_changes(title, config), config, lambda each: resident(each) + beside, device.available)
            )
    named = min((each for each in remedies if each is not None), key=lambda each: each[1], default=None)
    if named is None:
        return "no single setting would make it need less"
    words, size = named
    verb = "it would fit with" if size <= device.available else "it would need less, though not little enough, with"
    return f"{verb} {words} ({size / GIB:.3g} GiB)"


def lasting_changes(title: str, config: Config) -> Iterator[Change]:
    """Yields settings that reduce the lasting memory of a process, those that cost least speed or accuracy first."""
    trainer, rollout, full = config.trainer, config.rollout, config.tune == FULL
    if title != ROLLOUT:
        if trainer.num_workers > 1 and trainer.shard != "full" and not trainer.cpu_offload:
            yield {"trainer.shard": "full"}
        if trainer.shard != "none":
            yield {"trainer.num_workers": 2 * trainer.num_workers}
    if title != TRAINER:
        left = {"resident": ("offload", "cached"), "offload": ("cached",), "cached": ()}[rollout.text_encoder]
        yield from ({"rollout.text_encoder": where} for where in left)
    if title != ROLLOUT and not trainer.cpu_offload and not full:
        yield {"trainer.cpu_offload": True}
    if config.model.dtype == "float32":
        yield {"model.dtype": "bfloat16"}
    if config.lora.rank > 1 and not full:
        yield {"lora.rank": config.lora.rank // 2}
    if config.max_staleness > 0:
        yield fresh_images(config)


def passing_changes(title: str, config: Config) -> Iterator[Change]:
    """Yields settings that reduce the activations of a process, those that cost least speed first."""
    trainer, rollout = config.trainer, config.rollout
    if title != ROLLOUT:
        if trainer.gradient_checkpointing != "full":
            yield {"trainer.gradient_checkpointing": "full"}
        if trainer.micro_batch_size > 1:
            yield {"trainer.micro_batch_size": 1}
    if title != TRAINER:
        if rollout.tickets_per_batch > 1:
            yield {"rollout.tickets_per_batch": 1}
        if (rollout.batch_size or config.images_per_ticket) > 1:
            yield {"rollout.batch_size": 1}
        if not rollout.vae_tiling:
            yield {"rollout.vae_tiling": True}


def tight(title: str, footprint: Footprint, available: int) -> str:
    """Returns the warning for a process that nearly fills, or exceeds, its `available` bytes."""
    parts = ", ".join(f"{name} {size / GIB:.3g}" for name, size in footprint.parts.items() if size)
    runtime = RUNTIME_BYTES / GIB
    return (
        f"{title} is planned to need {footprint.total / GIB:.3g} of its device's {available / GIB:.3g} GiB "
        f"({footprint.total / available:.0%}: {parts}, margin {MARGIN_SHARE:.0%} and {runtime:.3g} of runtime): it may "
        "run out of memory"
    )
