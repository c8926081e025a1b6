"""Diagnosis of a run from its events: one sentence that names the bottleneck and what would make the run shorter."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from async_flowrl.config.placement import recorded_placement
from async_flowrl.config.scoring_pools import is_reward_pool, workers_key
from async_flowrl.observability.events import Event, step_window
from async_flowrl.observability.intervals import Interval, length, subtract, union
from async_flowrl.observability.ledger import STATES, pool_of
from async_flowrl.observability.summary import last_attempt
from async_flowrl.observability.timeline import Track, by_device, by_pool, device_time

# Smallest share of its time that a pool must lose in one state before the loss is mentioned.
MIN_LOST_SHARE = 0.1
# A reward pool is the bottleneck only if its workers are occupied, and the trainer waits for images, for these shares.
MIN_OCCUPIED = 0.85
MIN_WAITED = 0.1
SPLIT = "async-flowrl plan --from-run says which split of the devices would be faster."
LITTLE = "Too little was recorded to name a bottleneck."
# Pool and the state in which it loses most of its time → the sentence, from the share of its time.
LOST = {
    (
        "trainer",
        "wait_data",
    ): "Rollout-bound: the trainer waited for images {:.0%} of the time; more rollout workers or "
    f"fewer denoising steps shorten the run, and {SPLIT}",
    ("rollout", "idle"): "Training-bound: rollout workers had nothing to do {:.0%} of the time; more trainer ranks "
    f"shorten the run, and {SPLIT}",
    ("trainer", "sync"): "Publishing weights is the bottleneck: it held the trainer up {:.0%} of the time.",
    (
        "rollout",
        "wait_weights",
    ): "Delivering weights is the bottleneck: rollout workers waited for new weights {:.0%} of "
    "the time; a faster transport or a larger max_staleness shortens the run.",
}


def verdict(workers: Sequence[Track], history: Sequence[Event], *, placement: str | None) -> str:
    together = recorded_placement(placement).together
    if together:
        # Since it was last resumed: before that, nobody had anything to do for as long as it was not running.
        workers, history = by_device(workers), last_attempt(history)[1]
    window = step_window(history)
    if (sentence := reward_bound(workers, window)) is not None:
        return sentence
    return of_shared(workers, window) if together else bottleneck(step_pools(workers, window))


def of_shared(workers: Sequence[Track], window: Interval) -> str:
    shares = device_time(workers, window)
    if not shares:
        return LITTLE
    start = f"Shared processes sampled {shares['sampled']:.0%} and trained {shares['trained']:.0%} of the time"
    if shares["idle"] < MIN_LOST_SHARE:
        return f"{start}: the devices are the limit, and neither phase waits for the other."
    return (
        f"{start}, and had nothing to do {shares['idle']:.0%} of it, for rewards or at the end of a step: more reward "
        "workers, more and smaller tickets (ticket_size) or a larger max_staleness shorten the run."
    )


def bottleneck(pools: Mapping[str, Mapping[str, float]]) -> str:
    if not all(sum(pools.get(pool, {}).values()) > 0 for pool in ("trainer", "rollout")):
        return LITTLE
    lost = {(pool, state): pools[pool].get(state, 0.0) / sum(pools[pool].values()) for pool, state in LOST}
    (pool, state), share = max(lost.items(), key=lambda item: item[1])
    waited, starved = lost["trainer", "wait_data"], lost["rollout", "idle"]
    if share < MIN_LOST_SHARE:
        return "The pools are balanced: neither side loses a tenth of its time waiting for the other."
    if min(waited, starved) >= MIN_LOST_SHARE and share in (waited, starved):
        return (
            f"The pools take turns: the trainer waited for images {waited:.0%} of the time and rollout workers had "
            f"nothing to do {starved:.0%} of it; a larger max_staleness lets them work side by side."
        )
    return LOST[pool, state].format(share)


def step_pools(workers: Sequence[Track], window: Interval) -> dict[str, dict[str, float]]:
    """Pool → state → seconds inside `window`, summed over the pool's places."""
    pools = {pool: dict.fromkeys(STATES, 0.0) for pool in by_pool(workers)}
    for track in workers:
        for state, times in track.states(window).items():
            pools[pool_of(track.place)][state] += length(times)
    return pools


def reward_bound(workers: Sequence[Track], window: Interval) -> str | None:
    """One sentence about the reward pool that is the bottleneck in `window`, and the setting that helps, or None."""
    whole = window[1] - window[0]
    pools = by_pool(workers)
    seconds = {pool: [occupied(track, window) for track in tracks] for pool, tracks in pools.items()}
    rewards = {pool: by_worker for pool, by_worker in seconds.items() if is_reward_pool(pool)}
    if not rewards or whole <= 0 or not {"trainer", "rollout"} <= pools.keys():
        return None
    slowest = max(rewards, key=lambda pool: fmean(rewards[pool]))
    busy, others = fmean(rewards[slowest]), max(fmean(seconds["rollout"]), fmean(seconds["trainer"]))
    waited = fmean(length(track.states(window).get("wait_data", [])) for track in pools["trainer"])
    if busy < MIN_OCCUPIED * whole or busy <= others or waited < MIN_WAITED * whole:
        return None
    return (
        f"Reward-bound: workers of the pool {slowest} were busy {busy / whole:.0%} of the time, and the trainer waited "
        f"for images {waited / whole:.0%} of it; more of them ({workers_key(slowest)}) shorten the run, and {SPLIT}"
    )


def occupied(track: Track, window: Interval) -> float:
    """Seconds of `window` in which a worker was in no waiting state."""
    return length(subtract([window], union(interval for times in track.waits.values() for interval in times)))
