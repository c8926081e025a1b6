"""The bottleneck of a run in one sentence, from its events, and what to change to make the run shorter."""

from collections.abc import Mapping, Sequence

from async_flowrl.observability.events import Event
from async_flowrl.observability.intervals import Interval, intersect, length
from async_flowrl.observability.ledger import STATES, pool_of
from async_flowrl.observability.reward_bound import reward_bound
from async_flowrl.observability.timeline import Track

MIN_LOST_SHARE = 0.1
"""Shares of its time below this that a pool loses are not mentioned."""
MAX_SPLIT_SHARE = 0.97
"""Another split of the devices is mentioned if steps would take at most this share of their time."""


def verdict(workers: Sequence[Track], history: Sequence[Event], *, placement: str) -> str:
    """The bottleneck of a run, from its events and the shape of its step."""
    window = step_window(history)
    if (sentence := reward_bound(workers, window)) is not None:
        return sentence
    split = better_split(workers, window) if placement == "separate" else None
    return bottleneck(step_pools(workers, window), split)


def bottleneck(pools: Mapping[str, Mapping[str, float]], split: str | None = None) -> str:
    """One sentence from the pools' seconds per state: what to change to make the run shorter.

    `split` (see better_split) is tried first where one of the pools is too small.
    """
    share = {
        (pool, state): value / sum(seconds.values())
        for pool, seconds in pools.items()
        for state, value in seconds.items()
        if sum(seconds.values()) > 0
    }
    waited, held_up = share.get(("trainer", "wait_data"), 0.0), share.get(("trainer", "sync"), 0.0)
    starved, late = share.get(("rollout", "idle"), 0.0), share.get(("rollout", "wait_weights"), 0.0)
    if ("trainer", "busy") not in share or ("rollout", "busy") not in share:
        return "Too little was recorded to name a bottleneck."
    if max(waited, held_up, starved, late) < MIN_LOST_SHARE:
        return "The pools are balanced: neither side loses a tenth of its time waiting for the other."
    if held_up > max(waited, starved, late):
        return f"Publishing weights is the bottleneck: it held the trainer up {held_up:.0%} of the time."
    if late > max(waited, starved):
        return (
            f"Delivering weights is the bottleneck: rollout workers waited for new weights {late:.0%} of the time; a "
            "faster transport or a larger max_staleness shortens the run."
        )
    if min(waited, starved) >= MIN_LOST_SHARE:
        return (
            f"The pools take turns: the trainer waited for images {waited:.0%} of the time and rollout workers had "
            f"nothing to do {starved:.0%} of it; a larger max_staleness lets them work side by side."
        )
    instead = f"try {split} devices" if split else None
    if waited > starved:
        return (
            f"Rollout-bound: the trainer waited for images {waited:.0%} of the time; "
            f"{instead or 'more rollout workers or fewer denoising steps shorten the run'}."
        )
    advice = "more trainer ranks shorten the run, and fewer rollout workers do not lengthen it"
    return f"Training-bound: rollout workers had nothing to do {starved:.0%} of the time; {instead or advice}."


def better_split(workers: Sequence[Track], window: Interval) -> str | None:
    """ "5:3" if so many rollout and trainer devices would do the same work in less time than the ones there were.

    Work is what each pool was busy with; colocated pools have nothing to split.
    """
    work, devices = {"rollout": 0.0, "trainer": 0.0}, {"rollout": 0, "trainer": 0}
    for track in workers:
        if (pool := pool_of(track.place)) in work:
            work[pool] += length(intersect(track.busy, [window]))
            devices[pool] += 1
    total = sum(devices.values())

    def seconds(rollout: int) -> float:
        return max(work["rollout"] / rollout, work["trainer"] / (total - rollout))

    if min(devices.values()) == 0:
        return None
    best = min(range(1, total), key=seconds)
    return f"{best}:{total - best}" if seconds(best) < MAX_SPLIT_SHARE * seconds(devices["rollout"]) else None


def step_pools(workers: Sequence[Track], window: Interval) -> dict[str, dict[str, float]]:
    """Seconds per pool and state inside the window, from the events; start-up and the end do not count."""
    pools: dict[str, dict[str, float]] = {}
    for track in workers:
        seconds = pools.setdefault(pool_of(track.place), dict.fromkeys(STATES, 0.0))
        for state in STATES:
            intervals = track.busy if state == "busy" else track.waiting(state)
            seconds[state] += length(intersect(intervals, [window]))
    return pools


def step_window(history: Sequence[Event]) -> Interval:
    """From the start of the first step to the end of the last; without any step, of all events."""
    steps = [event for event in history if event["event"] == "step"]
    if steps:
        return min(event["started"] for event in steps), max(event["ended"] for event in steps)
    times = [event["time"] for event in history] or [0.0, 1.0]
    return min(times), max(times)
