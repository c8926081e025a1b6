"""Diagnosis of a run from its events: one sentence that names the bottleneck and what would make the run shorter."""

from collections.abc import Callable, Mapping, Sequence

from async_flowrl.config.schema import Config
from async_flowrl.config.shared import SHARED
from async_flowrl.config.shared_advice import sharing_refusal
from async_flowrl.observability.events import Event, step_window
from async_flowrl.observability.intervals import Interval, intersect, length
from async_flowrl.observability.ledger import STATES, pool_of
from async_flowrl.observability.one_device import by_device, device_time
from async_flowrl.observability.reward_bound import reward_bound
from async_flowrl.observability.summary import last_attempt
from async_flowrl.observability.timeline import Track

MIN_LOST_SHARE = 0.1
"""Smallest share of its time that a pool must lose in one state before the loss is mentioned."""
MAX_SPLIT_SHARE = 0.97
"""Another split of the devices is proposed only if a step would take less than this share of its present time, and
`placement=shared` only if it would take less than this share of the time with the best split."""


def unknown() -> None:
    """Stands for the configuration of a run that nobody knows."""


def verdict(
    workers: Sequence[Track],
    history: Sequence[Event],
    *,
    placement: str,
    config: Callable[[], Config | None] = unknown,
) -> str:
    """The sentence about a run. `workers` are its tracks (timeline.py), `history` its events.

    `placement` is the setting of that name; a split of devices is proposed only for "separate". `config` returns
    the run's configuration, or None if nobody knows it.
    """
    if placement == SHARED:
        # Since it was last resumed: before that, nobody had anything to do for as long as it was not running.
        workers, history = by_device(workers), last_attempt(history)[1]
    window = step_window(history)
    if (sentence := reward_bound(workers, window)) is not None:
        return sentence
    if placement == SHARED:
        return of_shared(workers, history, window)
    advice = better_placement(workers, window, config) if placement == "separate" else None
    return bottleneck(step_pools(workers, window), advice)


def of_shared(workers: Sequence[Track], history: Sequence[Event], window: Interval) -> str:
    """The sentence about processes that sample and train: what limits them, devices, rewards or the end of a step."""
    shares = device_time(workers, history, window)
    if shares is None:
        return "Too little was recorded to name a bottleneck."
    said = f"Shared processes sampled {shares.sampled:.0%} and trained {shares.trained:.0%} of the time"
    if shares.idle < MIN_LOST_SHARE:
        return f"{said}: the devices are the limit, and neither phase waits for the other."
    between = shares.idle - shares.rewards - shares.barrier
    if shares.rewards >= max(shares.barrier, between):
        return (
            f"{said}. Rewards are the limit: devices had nothing to do {shares.idle:.0%} of the time, "
            f"{shares.rewards:.0%} while a reward was made; more reward workers or a larger max_staleness shorten "
            "the run."
        )
    if shares.barrier >= between:
        return (
            f"{said}. The end of a step is the limit: devices had nothing to do {shares.idle:.0%} of the time, "
            f"{shares.barrier:.0%} while another one computed; more and smaller tickets (ticket_size) or a larger "
            "max_staleness shorten the run."
        )
    return (
        f"{said}, and had nothing to do {shares.idle:.0%} of it, mostly between steps: versions, checkpoints and the "
        "controller's own work."
    )


def bottleneck(pools: Mapping[str, Mapping[str, float]], better: str | None = None) -> str:
    """The sentence from `pools` (pool → state → seconds); the advice is `better` (see better_placement) if given."""
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
    instead = f"try {better}" if better else None
    if waited > starved:
        return (
            f"Rollout-bound: the trainer waited for images {waited:.0%} of the time; "
            f"{instead or 'more rollout workers or fewer denoising steps shorten the run'}."
        )
    advice = "more trainer ranks shorten the run, and fewer rollout workers do not lengthen it"
    return f"Training-bound: rollout workers had nothing to do {starved:.0%} of the time; {instead or advice}."


def better_placement(
    workers: Sequence[Track], window: Interval, config: Callable[[], Config | None] = unknown
) -> str | None:
    """The best placement of the work on the present devices, e.g. "5:3 devices" for 5 rollout and 3 trainer devices.

    It is "placement=shared …" where no split comes near to it, if the run's `config` is known and would not be refused
    with it. It is None if nothing is better than the present split. It assumes that the busy seconds of each pool in
    `window` can be divided evenly over its devices, or with `placement=shared` over all devices.
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
    shared = sum(work.values()) / total
    gains = shared < MAX_SPLIT_SHARE * seconds(best)
    if gains and (known := config()) is not None and sharing_refusal(known, total) is None:
        saved = 1 - shared / seconds(devices["rollout"])
        return (
            f"placement=shared, where each of the {total} devices samples and trains: a step takes up to {saved:.0%} "
            "less time, if a device holds the base, the optimizer and the activations"
        )
    return f"{best}:{total - best} devices" if seconds(best) < MAX_SPLIT_SHARE * seconds(devices["rollout"]) else None


def step_pools(workers: Sequence[Track], window: Interval) -> dict[str, dict[str, float]]:
    """Pool → state → seconds inside `window`, summed over the pool's places."""
    pools: dict[str, dict[str, float]] = {}
    for track in workers:
        seconds = pools.setdefault(pool_of(track.place), dict.fromkeys(STATES, 0.0))
        for state in STATES:
            intervals = track.busy if state == "busy" else track.waiting(state)
            seconds[state] += length(intersect(intervals, [window]))
    return pools
