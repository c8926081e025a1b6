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
SCORING = "SCORING"
"""State of a ticket that has images and no reward yet (tickets/ticket.py)."""


def by_device(workers: Sequence[Track]) -> list[Track]:
    """Returns the tracks sorted by process, without waits during which the other worker of the process computes."""
    sharing = {track.place: track for track in workers if pool_of(track.place) in SHARING_POOLS}
    found = []
    for index in sorted({_index(place) for place in sharing}):
        own = [sharing[place] for place in (f"{pool}-{index}" for pool in SHARING_POOLS) if place in sharing]
        busy = union(interval for track in own for interval in track.busy)
        found += [Track(track.place, track.spans, _left(track, busy)) for track in own]
    return found + [track for track in workers if track.place not in sharing]


def _left(track: Track, busy: Sequence[Interval]) -> list[tuple[str, Interval]]:
    return [(state, part) for state, interval in track.waits for part in subtract([interval], busy)]


def _index(place: str) -> int:
    return int(place.rpartition("-")[2])


@dataclass(frozen=True)
class DeviceTime:
    """Mean shares of the time of all devices, from 0 to 1.

    What is left of the whole is time in which no device computed and no reward was made, e.g. between two steps.
    """

    sampled: float
    trained: float
    rewards: float
    """Nothing to do while the reward of a training group was made."""
    barrier: float
    """Nothing to do while another device computed, and no reward was made."""

    @property
    def idle(self) -> float:
        return max(0.0, 1.0 - self.sampled - self.trained)


def device_shares(workers: Sequence[Track], history: Sequence[Event], *, shared: bool) -> dict[str, float | None]:
    """Returns the numbers of `device_time` from the first to the last step, and the idle share, by name.

    They are None if nothing of it was recorded, or if the run's processes do not sample and train (`shared`).
    """
    found = device_time(workers, history, step_window(history)) if shared else None
    if found is None:
        return dict.fromkeys([*(field.name for field in fields(DeviceTime)), "idle"])
    return {**asdict(found), "idle": found.idle}


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
    rewards = sum(length(intersect(each, scoring)) for each in idle)
    barrier = sum(length(subtract(intersect(each, anyone), scoring)) for each in idle)
    return DeviceTime(work["rollout"] / whole, work["trainer"] / whole, rewards / whole, barrier / whole)


def _scoring(history: Sequence[Event]) -> list[Interval]:
    """Returns the times at which a training ticket's images were there, and its reward was not."""
    began: dict[int, float] = {}
    found = []
    for event in history:
        if event["event"] == "ticket" and event["kind"] == TRAIN:
            if event["state"] == SCORING:
                began[event["ordinal"]] = event["time"]
            elif event["ordinal"] in began:
                found.append((began.pop(event["ordinal"]), event["time"]))
    return union(found)
