"""Comparison of the memory plan with the devices of a run, made before its models are loaded."""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

from async_flowrl.config.check import ConfigError, check
from async_flowrl.config.placement import placement_of
from async_flowrl.config.schema import SHARED, Config, RewardTerm, RolloutConfig, TrainerConfig
from async_flowrl.config.scoring_pools import (
    ROLLOUT,
    TRAINER,
    held_out_by_pool,
    scoring_pools,
    section_of,
    served_terms,
)
from async_flowrl.memory.footprints import (
    GIB,
    MARGIN_SHARE,
    RUNTIME_BYTES,
    Footprint,
    Process,
    beside,
    in_one,
    planned_rollout,
    planned_trainer,
    rollout_ranks,
)
from async_flowrl.policies.tuning import tuning_of
from async_flowrl.rewards.registry import memory_gib
from async_flowrl.tickets.arithmetic import check_batching
from separation.resources import fewest_gpus

logger = logging.getLogger(__name__)
MEMORY_WARNING_SHARE = 0.9  # Share of a process's device memory above which planned memory leads to a warning.


def processes(config: Config, pools: Collection[str] | None = None, *, lasting: bool = False) -> Iterator[Process]:
    """Yields the kinds of process that workers of `pools` are (None: all), with their memory. Raises as `plan_memory`.

    Trainer rank and rollout worker are one if they share a device. `lasting` leaves out activations.
    """
    rank, worker = partial(planned_trainer, config, lasting=lasting), partial(planned_rollout, config, lasting=lasting)
    shares = config.trainer.gpus_per_worker, config.rollout.gpus_per_worker

    def includes(*of: str) -> bool:
        return pools is None or any(pool in pools for pool in of)

    if len(placement_of(config).pools) == 1:
        if includes(SHARED, TRAINER, ROLLOUT):
            both = in_one(rank(), worker(), full=tuning_of(config).whole)
            yield Process("process that samples and trains", (SHARED, TRAINER, ROLLOUT), both, shares[0])
    elif config.runtime.in_threads and min(shares) > 0:
        if includes(TRAINER, ROLLOUT):
            both = beside(rank(), worker(), config.rollout.num_workers)
            yield Process("trainer rank with all rollout workers of its process", (TRAINER, ROLLOUT), both, 1.0)
    else:
        if includes(TRAINER):
            yield Process("trainer rank", (TRAINER,), rank(), shares[0])
        if includes(ROLLOUT):
            title = "GPU of a rollout worker" if rollout_ranks(config) > 1 else "rollout worker"
            yield Process(title, (ROLLOUT,), worker(), shares[1])
    yield from (seat for seat in reward_seats(config) if includes(*seat.pools))


def device_of(process: Process, memory: Mapping[str, int]) -> int:
    return min(memory[pool] for pool in process.pools if pool in memory)


def check_devices(config: Config, memory: Mapping[str, int]) -> list[str]:
    """Returns warnings for processes whose planned memory exceeds, or nearly fills, their device.

    `memory` is pool → bytes of its smallest device. Raises ConfigError if what lasts alone exceeds it, unless
    `allow_oom` is set. Any other failure becomes a warning, because the run may still succeed.
    """
    warnings = []
    try:
        for held in processes(config, memory, lasting=True):
            device = device_of(held, memory)
            available = held.available(device)
            if held.footprint.resident > available:
                warnings.append(judged(held, config, device))
                if not config.allow_oom:
                    raise ConfigError(f"{warnings[-1]}; allow_oom=true tries anyway")
                continue
            whole = next(processes(config, held.pools))
            if whole.footprint.parts and whole.footprint.total > MEMORY_WARNING_SHARE * available:
                warnings.append(f"{judged(whole, config, device)}; it may run out of memory")
    except ConfigError:
        raise
    except Exception as error:
        logger.info("no plan of the devices' memory", exc_info=True)
        return [f"the devices' memory was not compared with a plan: {type(error).__name__}: {error}"]
    return warnings


def judged(process: Process, config: Config, device: int) -> str:
    """Returns a sentence: what a process needs of `device` bytes, and what would help if that is too much."""
    held, available = process.footprint, process.available(device)
    if not held.parts:
        return f"a {process.title} has {available / GIB:.3g} GiB{process.caveat}"
    if held.resident > available:
        names, needed, what = held.lasting, held.resident, "without activations"
    else:
        names, needed = set(held.parts), held.total
        what = f"margin {MARGIN_SHARE:.0%}, runtime {RUNTIME_BYTES / GIB:.3g}"
    sizes = [f"{name} {size / GIB:.3g}" for name, size in held.parts.items() if size and name in names]
    parts = ", ".join([*sizes, what])
    sentence = f"a {process.title} needs {needed / GIB:.3g} of its {available / GIB:.3g} GiB ({parts}){process.caveat}"
    return sentence if needed <= available else f"{sentence}: {remedy(process, config, device)}"


def remedy(process: Process, config: Config, device: int) -> str:
    if process.key:
        total = process.footprint.total
        share = min(1.0, math.ceil(20 * total / device) / 20)
        return f"it would fit with {process.key}={share:g} and a device of {math.ceil(max(total, device) / GIB)} GiB"
    available = process.available(device)
    # If what lasts is too much, activations are left out, so settings that only they depend on change nothing.
    lasting = process.footprint.resident > available

    def needed(changed: Config) -> int:
        footprint = next(processes(changed, process.pools, lasting=lasting)).footprint
        return footprint.resident if lasting else footprint.total

    if (named := best(changes(process, config), config, needed, available)) is None:
        return "no single setting would make it need less"
    words, size = named
    verb = "it would fit with" if size <= available else "it would need less, though not little enough, with"
    return f"{verb} {words} ({size / GIB:.3g} GiB)"


Change = Mapping[str, Any]  # Configuration key → its new value; all of them are set together.


def changes(process: Process, config: Config) -> Iterator[Change]:
    """Yields settings that may reduce the memory of a process, those that cost least speed or accuracy first."""
    trains, samples, full = TRAINER in process.pools, ROLLOUT in process.pools, tuning_of(config).whole
    if trains:
        yield {"trainer.gradient_checkpointing": "full"}
        yield {"trainer.micro_batch_size": 1}
    if samples:
        yield {"rollout.tickets_per_batch": 1}
        yield {"rollout.batch_size": 1}
        yield {"rollout.vae_tiling": True}
    if trains:
        yield {"trainer.shard": "full"}
        yield {"trainer.num_workers": 2 * config.trainer.num_workers}
    if samples:
        yield {"rollout.text_encoder": "offload"}
        yield {"rollout.text_encoder": "cached"}
        yield {"rollout.versions_on": "host"}
    if trains:
        yield {"trainer.versions_on": "host"}
        yield {"trainer.sum_on": "host"}
        yield {"trainer.cpu_offload": True}
    if config.model.dtype == "float32":
        yield {"model.dtype": "bfloat16"}
    if not full:
        yield from ({"model.quantize": stored} for stored in ("int8", "nf4") if config.model.quantize is None)
        yield {"lora.rank": config.lora.rank // 2}
    mode = {} if config.mode is None else {"mode": replace(config, max_staleness=0).mode_name}
    yield {"max_staleness": 0, **mode}


MODELS = "reward models"


def reward_seats(config: Config) -> list[Process]:
    """Returns a worker of every pool that scores images and whose workers have GPUs; no reward is built."""
    # The workers of the first pool also score evaluations, so its seat includes the terms of `evaluate.reward` that
    # have no pool of their own.
    seats: list[Process] = []
    held_out = held_out_by_pool(config)
    for pool in scoring_pools(config):
        if pool.gpus_per_worker > 0:
            terms = {**pool.config(config.reward).terms, **held_out.get(pool.name, {})}
            gib_by_term = {name: _gib(name, term) for name, term in terms.items()}
            parts = {f"{MODELS}: {name}": round(gib * GIB) for name, gib in gib_by_term.items() if gib is not None}
            unknown = ", ".join(name for name, gib in gib_by_term.items() if gib is None)
            caveat = f", and what {unknown} takes is unknown" if unknown else ""
            key = f"{section_of(pool.name)}.gpus_per_worker"
            title = f"worker of the pool {pool.name}"
            seats.append(Process(title, (pool.name,), Footprint(parts), pool.gpus_per_worker, key, caveat))
    return seats


def _gib(name: str, term: RewardTerm) -> float | None:
    try:
        return memory_gib(name, term)
    except ValueError as error:
        logger.info("the memory of the reward %s is not known: %s", name, error)
        return None


def gpus_by_pool(config: Config) -> dict[str, list[float]]:
    """Returns pool → GPUs per worker, without pools that have none; `placement=shared` counts as one pool."""
    sections: tuple[TrainerConfig | RolloutConfig, ...] = (config.trainer, config.rollout)
    pools = dict(zip(placement_of(config).pools, sections, strict=False))  # One shared pool is the trainer's.
    shares = {name: [pool.gpus_per_worker] * pool.num_workers for name, pool in pools.items()}
    shares |= {pool.name: [pool.gpus_per_worker] * pool.workers for pool in scoring_pools(config)}
    shares |= {f"servers of {name}": [serve.gpus] * serve.replicas for name, serve in served_terms(config)}
    return {pool: [gpus for gpus in counts if gpus > 0] for pool, counts in shares.items() if any(counts)}


def gpus_taken(config: Config) -> float:
    return fewest_gpus(share for shares in gpus_by_pool(config).values() for share in shares)


def describe_gpus(config: Config) -> str:
    pools = ", ".join(
        f"{pool} {len(gpus)}" + ("" if gpus[0] == 1 else f" x {gpus[0]:g}")
        for pool, gpus in gpus_by_pool(config).items()
    )
    return f"the run takes {gpus_taken(config):g} devices: {pools or 'all of it runs on CPUs'}"


def overrides_of(change: Change, config: Config) -> list[str]:
    words = {key: str(value).lower() if isinstance(value, bool) else value for key, value in change.items()}
    return [f"{key}={words[key]}" for key in change if getattr(*_owner(config, key)) != change[key]]


def applied(change: Change, config: Config) -> Config:
    changed = deepcopy(config)
    for key, value in change.items():
        setattr(*_owner(changed, key), value)
    return changed


def _owner(config: Config, key: str) -> tuple[Any, str]:
    *path, name = key.split(".")
    owner: Any = config
    for part in path:
        owner = owner[part] if isinstance(owner, dict) else getattr(owner, part)
    return owner, name


def best(
    tried: Iterable[Change], config: Config, needed: Callable[[Config], int], available: int
) -> tuple[str, int] | None:
    """Returns in words the first change with which `needed(config)` bytes are at most `available`, and those bytes.

    If none is enough, it is the change that needs least; None if no change makes it less.
    """
    least, smallest = needed(config), None
    for change in tried:
        changed = applied(change, config)
        try:
            check(changed)
            check_batching(changed)
        except ValueError:
            continue
        if (size := needed(changed)) < least:
            least, smallest = size, (" ".join(overrides_of(change, config)), size)
            if size <= available:
                break
    return smallest
