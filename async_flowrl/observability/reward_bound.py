"""Whether a reward pool held a run up, and how many workers would have been enough."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from async_flowrl.config.reward_pools import is_reward_pool, workers_key
from async_flowrl.observability.intervals import Interval, intersect, length, subtract, union
from async_flowrl.observability.ledger import pool_of
from async_flowrl.observability.timeline import Track

MIN_TAKEN = 0.85
"""Share of its time that a pool's workers must be taken to be the bottleneck: a slower one costs latency only."""
MIN_WAITED = 0.1
"""Share of its time that the trainer must wait for images."""


def reward_bound(workers: Sequence[Track], window: Interval) -> str | None:
    """One sentence if the slowest reward pool is the bottleneck: which it is, and the setting that would cure it.

    None where generation or training is, or where the trainer hardly waits.
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
    """Seconds in which a worker had something to do: all that it did not wait."""
    return length(subtract([window], union(interval for _, interval in track.waits)))


def enough(rewards: Mapping[str, Sequence[float]], others: float) -> dict[str, int]:
    """Workers by reward pool with which none is taken for longer than `others` seconds; only where more are needed."""
    found = {}
    for pool, each in rewards.items():
        needed = math.ceil(sum(each) / others) if others > 0 else len(each) + 1
        if needed > len(each):
            found[pool] = needed
    return found
