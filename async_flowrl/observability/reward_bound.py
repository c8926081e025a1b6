"""Test whether a reward pool (workers that score images) limited the speed of a run, and how many workers it needs."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from async_flowrl.config.pools import is_reward_pool, workers_key
from async_flowrl.observability.intervals import Interval, intersect, length, subtract, union
from async_flowrl.observability.ledger import pool_of
from async_flowrl.observability.timeline import Track

MIN_TAKEN = 0.85
"""A reward pool can be the bottleneck only if its workers are occupied for at least this share of the time."""
MIN_WAITED = 0.1
"""A reward pool can be the bottleneck only if the trainer waits for images for at least this share of the time."""


def reward_bound(workers: Sequence[Track], window: Interval) -> str | None:
    """One sentence with the name of the reward pool that is the bottleneck in `window` and the settings that help.

    None if rollout or trainer workers are occupied longer, or if one of the two thresholds above is not reached.
    """
    whole = window[1] - window[0]
    pools: dict[str, list[Track]] = {}
    for track in workers:
        pools.setdefault(pool_of(track.place), []).append(track)
    seconds = {pool: [taken(track, window) for track in tracks] for pool, tracks in pools.items()}
    rewards = {pool: each for pool, each in seconds.items() if is_reward_pool(pool)}
    if not rewards or whole <= 0 or not {"trainer", "rollout"} <= pools.keys():
        return None
    slowest = max(rewards, key=lambda pool: fmean(rewards[pool]))
    busy, others = fmean(rewards[slowest]), max(fmean(seconds["rollout"]), fmean(seconds["trainer"]))
    waited = fmean(length(intersect(track.waiting("wait_data"), [window])) for track in pools["trainer"])
    if busy < MIN_TAKEN * whole or busy <= others or waited < MIN_WAITED * whole:
        return None
    cure = " ".join(f"{workers_key(pool)}={count}" for pool, count in enough(rewards, others).items())
    count = len(rewards[slowest])
    who = "the worker" if count == 1 else f"the {count} workers"
    return (
        f"Reward-bound: {who} of the pool {slowest} {'was' if count == 1 else 'were'} busy {busy / whole:.0%} of the "
        f"time, and the trainer waited for images {waited / whole:.0%} of it; {cure} would be enough."
    )


def taken(track: Track, window: Interval) -> float:
    """Seconds of `window` in which a worker was in no waiting state."""
    return length(subtract([window], union(interval for _, interval in track.waits)))


def enough(rewards: Mapping[str, Sequence[float]], others: float) -> dict[str, int]:
    """Reward pool → number of workers it needs so that each is occupied for at most `others` seconds.

    `rewards` is pool → occupied seconds per worker. Pools that have enough workers are left out.
    """
    workers = {}
    for pool, each in rewards.items():
        needed = math.ceil(sum(each) / others) if others > 0 else len(each) + 1
        if needed > len(each):
            workers[pool] = needed
    return workers
