"""Processes of `placement=shared` in a run's records: two tracks per device, and the reasons for its idle time."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from async_flowrl.observability.events import Event, step_window
from async_flowrl.observability.intervals import Interval, intersect, length, subtract, union
from async_flowrl.observability.ledger import pool_of
from async_flowrl.observability.timeline import Track
from async_flowrl.types import TRAIN

SHARING_POOLS = ("rollout", "trainer")
"""Pools whose workers of the same number are one process."""
PENDING, SCORING, READY = "PENDING", "SCORING", "READY"
"""States of a ticket that waits to be made (again), that has images and no reward yet, and whose group has its rewards
(tickets/ticket.py)."""


def by_device(workers: Sequence[Track]) -> list[Track]:
    """Returns the tracks sorted by process, without waits during which the other worker of the process computes."""
    sharing = {track.place: track for track in workers if pool_of(track.place) in SHARING_POOLS}
    sorted_tracks = []
    for index in sorted({_index(place) for place in sharing}):
        own = [sharing[place] for place in (f"{pool}-{index}" for pool in SHARING_POOLS) if place in sharing]
        busy = union(interval for track in own for interval in track.busy)
        sorted_tracks += [Track(track.place, track.spans, _left(track, busy)) for track in own]
    return sorted_tracks + [track for track in workers if track.place not in sharing]


def _left(track: Track, busy: Sequence[Interval]) -> list[tuple[str, Interval]]:
    return [(state, part) for state, interval in track.waits for part in subtract([interval], busy)]


def _index(place: str) -> int:
    return int(place.rpartition("-")[2])


@dataclass(frozen=True)
class DeviceTime:
    """Mean shares of the time of all devices, from 0 to 1.

    A process may sample beside its optimizer step, so `sampled`, `trained` and `idle` may add up to more than 1. What
    `rewards` and `barrier` leave of `idle` is time in which no device computed and no reward was made, e.g. between two
    steps.
    """

    sampled: float
    trained: float
    idle: float
    """Nothing to do: a device neither sampled nor trained."""
    rewards: float
    """Nothing to do while the reward of a training group was made."""
    barrier: float
    """Nothing to do while another device computed, and no reward was made."""


def device_shares(workers: Sequence[Track], history: Sequence[Event], *, shared: bool) -> dict[str, float | None]:
    """Returns the numbers of `device_time` from the first to the last step, by name.

    They are None if nothing of it was recorded, or if the run's processes do not sample and train (`shared`).
    """
    time = device_time(workers, history, step_window(history)) if shared else None
    return dict.fromkeys(field.name for field in fields(DeviceTime)) if time is None else asdict(time)


def device_time(workers: Sequence[Track], history: Sequence[Event], window: Interval) -> DeviceTime | None:
    """Returns what the devices did in `window`, unix seconds; None if nothing of it was recorded."""
    both = [track for track in workers if pool_of(track.place) in SHARING_POOLS]
    indices = {_index(track.place) for track in both}
    whole = (window[1] - window[0]) * len(indices)
    if whole <= 0:
        return None
    work = dict.fromkeys(SHARING_POOLS, 0.0)
    idle: list[list[Interval]] = []
    for index in indices:
        own = [track for track in both if _index(track.place) == index]
        for track in own:
            work[pool_of(track.place)] += length(intersect(track.busy, [window]))
        idle.append(subtract([window], union(interval for track in own for interval in track.busy)))
    scoring = _scoring(history)
    anyone = union(interval for track in both for interval in track.busy)
    return DeviceTime(
        sampled=work["rollout"] / whole,
        trained=work["trainer"] / whole,
        idle=sum(length(each) for each in idle) / whole,
        rewards=sum(length(intersect(each, scoring)) for each in idle) / whole,
        barrier=sum(length(subtract(intersect(each, anyone), scoring)) for each in idle) / whole,
    )


def _scoring(history: Sequence[Event]) -> list[Interval]:
    """Returns the times at which all images of a training group were there, and its rewards were not."""
    began: dict[tuple[int, int], float] = {}
    waits = []
    for event in history:
        if event["event"] != "ticket" or event["kind"] != TRAIN:
            continue
        group = event["step"], event["group"]
        if event["state"] == SCORING:
            began[group] = event["time"]  # of its last ticket in the end: before that nobody makes rewards
        elif event["state"] == READY and group in began:
            waits.append((began.pop(group), event["time"]))
        elif event["state"] == PENDING:
            began.pop(group, None)
    return union(waits)
