"""GPUs that a configuration takes, and the device memory of reward workers as far as the rewards declare it."""

import logging
from collections.abc import Collection

from async_flowrl.config.placement import placement_of
from async_flowrl.config.pools import held_out_by_pool, scoring_pools, section_of, served_terms
from async_flowrl.config.schema import SHARED, Config, RewardTerm, RolloutConfig, TrainerConfig
from async_flowrl.memory.processes import GIB, Footprint, Process
from async_flowrl.rewards.registry import memory_gib
from separation.placement import fewest_gpus

logger = logging.getLogger(__name__)

MODELS = "reward models"


def reward_seats(config: Config) -> list[Process]:
    """Returns a worker of every pool that scores images and whose workers have GPUs.

    The rewards' classes are looked up, but no reward is built. The workers of the first pool also score evaluations,
    so its seat includes the terms of `evaluate.reward` that have no pool of their own.
    """
    seats: list[Process] = []
    held_out = held_out_by_pool(config)
    for pool in scoring_pools(config):
        if pool.gpus_per_worker > 0:
            terms = {**pool.config(config.reward).terms, **held_out.get(pool.name, {})}
            said = {name: _gib(name, term) for name, term in terms.items()}
            parts = {f"{MODELS}: {name}": round(gib * GIB) for name, gib in said.items() if gib is not None}
            unknown = ", ".join(name for name, gib in said.items() if gib is None)
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
    """Returns pool → GPUs of each of its workers, without pools that have none.

    Trainer and rollout workers that share their processes count as one pool.
    """
    pools: dict[str, TrainerConfig | RolloutConfig] = {"trainer": config.trainer, "rollout": config.rollout}
    if placement_of(config).together:
        pools = {SHARED: config.trainer}
    shares = {name: [pool.gpus_per_worker] * pool.num_workers for name, pool in pools.items()}
    shares |= {pool.name: [pool.gpus_per_worker] * pool.workers for pool in scoring_pools(config)}
    shares |= {f"servers of {name}": [serve.gpus] * serve.replicas for name, serve in served_terms(config)}
    return {pool: [gpus for gpus in each if gpus > 0] for pool, each in shares.items() if any(each)}


def gpus_taken(config: Config) -> float:
    """Returns the fewest GPUs that the run takes."""
    return fewest_gpus(share for each in gpus_by_pool(config).values() for share in each)


def describe_gpus(config: Config) -> str:
    """Returns one clause: how many devices the run takes, and how many workers each pool has."""
    taken = gpus_taken(config)
    pools = describe_pools(config) or "all of it runs on CPUs"
    return f"the run takes {taken:g} device{'' if taken == 1 else 's'}: {pools}"


def describe_pools(config: Config, without: Collection[str] = ()) -> str:
    """Returns the pools that have GPUs, and how many workers; those named in `without` are left out."""
    shares = {pool: each for pool, each in gpus_by_pool(config).items() if pool not in without}
    return ", ".join(
        f"{pool} {len(each)}" + ("" if each[0] == 1 else f" x {each[0]:g}") for pool, each in shares.items()
    )
