"""Reward pools in a plan: whether they limit the speed, and how many workers would change that. `advise` calls it."""

import math
from collections.abc import Mapping
from dataclasses import replace

from async_flowrl.config.reward_pools import SHARED, workers_key
from async_flowrl.plan.simulate import Prediction
from async_flowrl.plan.work import Bounds, Layout, Work

EPSILON = 1e-9


def cures(layout: Layout, limit: Bounds) -> dict[str, int]:
    """Returns reward pool → fewest workers with which it is no slower than the rest, for pools that are slower now."""
    if not limit.without_rewards > 0:
        return {}
    needed = {
        pool: math.ceil(limit.rewards[pool] * size / limit.without_rewards - EPSILON)
        for pool, size in layout.reward_workers.items()
    }
    return {pool: count for pool, count in needed.items() if count > layout.reward_workers[pool]}


def with_workers(layout: Layout, workers: Mapping[str, int]) -> Layout:
    """Returns the layout with the given numbers of workers (reward pool → workers) and the others as they are."""
    own = {pool: workers.get(pool, size) for pool, size in layout.own_rewards.items()}
    return replace(layout, reward=workers.get(SHARED, layout.reward), own_rewards=own)


def limit_sentence(
    work: Work, limited: Prediction, cured: Prediction | None, cure: Mapping[str, int], gpus: Mapping[str, float]
) -> str:
    """Returns the sentence that rewards are the limit, with the settings that would change that.

    `cured`: prediction with these settings, if there is one; `gpus`: reward pool → GPUs per worker.
    """
    slowest = max(limited.bounds.rewards, key=lambda pool: limited.bounds.rewards[pool])
    workers = limited.layout.reward_workers
    settings = " ".join(f"{workers_key(pool)}={count}" for pool, count in cure.items())
    seats = sum(gpus.get(pool, 0.0) * (count - workers[pool]) for pool, count in cure.items())
    more = f" ({seats:g} more GPUs)" if seats else ""
    then = f", and a step would take {cured.step_seconds:.3g} s" if cured is not None else ""
    return (
        f"Rewards are the limit: a step keeps the {_count(workers[slowest], 'worker')} of the pool {slowest} busy for "
        f"{limited.bounds.rewards[slowest]:.3g} s, generation and training for {limited.bounds.generation:.3g} and "
        f"{limited.bounds.update:.3g} s; {settings}{more} would cure that{then}."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
