"""Activity of a run's workers, a track for each, and timeline.json, a trace of it for https://ui.perfetto.dev.

A run writes it at its end, and `python -m async_flowrl.observability.timeline RUN` at any time.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from async_flowrl.observability.events import Event, read_events
from async_flowrl.observability.intervals import Interval, intersect, length, subtract, union
from async_flowrl.observability.ledger import STATES, place_of, pool_of

MICROSECONDS = 1e6
# Order of the tracks by pool; other pools come last.
POOLS = ("rollout", "reward", "trainer")
# Pools whose workers of the same number are one process.
SHARING_POOLS = ("rollout", "trainer")
# Events that the trace shows as a point in time.
INSTANTS = ("version", "fault", "worker_joined", "worker_left", "rollback", "step")


@dataclass
class Track:
    """Activity of one place (a numbered seat of a pool, e.g. "rollout-0"); all times are unix seconds."""

    place: str
    spans: list[Event] = field(default_factory=list)
    # State → its times, for all states except "busy", without the times at which a span ran.
    waits: Mapping[str, list[Interval]] = field(default_factory=dict)

    @cached_property
    def busy(self) -> list[Interval]:
        """Times at which any span ran. The result is cached, so all spans must be known before."""
        return union((span["start"], span["end"]) for span in self.spans)

    def states(self, window: Interval) -> dict[str, list[Interval]]:
        """State (of ledger.STATES) → the times inside `window` at which the place was in it, if there are any."""
        times = {"busy": self.busy, **self.waits}
        return {state: part for state in STATES if (part := intersect(times.get(state, []), [window]))}


def tracks(events: Iterable[Event]) -> list[Track]:
    by_place: dict[str, Track] = {}
    states: dict[str, list[tuple[float, str]]] = {}
    last = 0.0
    for event in events:
        last = max(last, event["time"], event.get("end", 0.0))
        if event["event"] in ("span", "state"):
            track = by_place.setdefault(place_of(event["worker"]), Track(place_of(event["worker"])))
            if event["event"] == "span":
                track.spans.append(event)
            else:
                states.setdefault(track.place, []).append((event["time"], event["state"]))
    for place, track in by_place.items():
        track.waits = _waits(states.get(place, []), last, track.busy)
    return sorted(by_place.values(), key=_order)


def _order(track: Track) -> tuple[int, str, int]:
    pool = pool_of(track.place)
    base = pool.split("/", 1)[0]
    return POOLS.index(base) if base in POOLS else len(POOLS), pool, _index(track.place)


def _waits(changes: list[tuple[float, str]], last: float, busy: list[Interval]) -> dict[str, list[Interval]]:
    by_state: dict[str, list[Interval]] = {}
    for (start, state), (end, _) in pairwise([*changes, (last, "")]):
        by_state.setdefault(state, []).append((start, end))
    return {state: subtract(union(times), busy) for state, times in by_state.items() if state != "busy"}


def by_pool(workers: Iterable[Track]) -> dict[str, list[Track]]:
    pools: dict[str, list[Track]] = {}
    for track in workers:
        pools.setdefault(pool_of(track.place), []).append(track)
    return pools


def worked(workers: Iterable[Track], window: Interval) -> dict[str, list[float]]:
    """Pool → the seconds inside `window` in which each of its workers was busy."""
    return {
        pool: [length(intersect(track.busy, [window])) for track in members]
        for pool, members in by_pool(workers).items()
    }


def by_device(workers: Sequence[Track]) -> list[Track]:
    """Returns the tracks sorted by process, without waits during which the other worker of the process computes."""
    busy = busy_by_device(workers)
    sharing = [track for track in workers if pool_of(track.place) in SHARING_POOLS]
    sharing.sort(key=lambda track: (_index(track.place), SHARING_POOLS.index(pool_of(track.place))))
    return [
        Track(t.place, t.spans, {state: subtract(times, busy[_index(t.place)]) for state, times in t.waits.items()})
        for t in sharing
    ] + [track for track in workers if pool_of(track.place) not in SHARING_POOLS]


def busy_by_device(workers: Iterable[Track]) -> dict[int, list[Interval]]:
    """Returns number of a process that samples and trains → times at which one of its workers computed."""
    busy: dict[int, list[Interval]] = {}
    for track in workers:
        if pool_of(track.place) in SHARING_POOLS:
            busy.setdefault(_index(track.place), []).extend(track.busy)
    return {number: union(intervals) for number, intervals in busy.items()}


def _index(place: str) -> int:
    return int(place.rpartition("-")[2])


def device_time(workers: Sequence[Track], window: Interval) -> dict[str, float]:
    """Mean shares of the time of all devices, from 0 to 1; `idle`: neither sampled nor trained. Empty without any time.

    A process may sample beside its optimizer step, so `sampled`, `trained` and `idle` may add up to more than 1.
    """
    busy = busy_by_device(workers)
    whole = (window[1] - window[0]) * len(busy)
    if whole <= 0:
        return {}
    seconds = worked(workers, window)
    sampled, trained = (sum(seconds.get(pool, ())) / whole for pool in SHARING_POOLS)
    idle = sum(length(subtract([window], intervals)) for intervals in busy.values())
    return {"sampled": sampled, "trained": trained, "idle": idle / whole}


def trace(events: Iterable[Event]) -> dict[str, Any]:
    """The trace as a dictionary in Chrome's Trace Event Format; times are microseconds since the first event."""
    history = list(events)
    start: float = min((event["start"] if "start" in event else event["time"] for event in history), default=0.0)
    numbered = enumerate(tracks(history), start=1)
    entries = [entry for number, track in numbered for entry in _track_events(track, number, start)]
    entries += [_instant(event, start) for event in history if event["event"] in INSTANTS]
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def write_timeline(events: Path, path: Path) -> None:
    path.write_text(json.dumps(trace(read_events(events))), encoding="utf-8")


def _track_events(track: Track, number: int, start: float) -> list[dict[str, Any]]:
    name = {"name": "thread_name", "ph": "M", "pid": 1, "args": {"name": track.place}}
    order = {"name": "thread_sort_index", "ph": "M", "pid": 1, "args": {"sort_index": number}}
    entries: list[dict[str, Any]] = [{**name, "tid": number * 100}, {**order, "tid": number * 100}]
    for lane, spans in enumerate(lanes(track.spans)):
        tid = number * 100 + lane
        if lane:
            entries.append({**name, "tid": tid, "args": {"name": f"{track.place} (beside)"}})
        for span in spans:
            arguments = {k: v for k, v in span.items() if k not in ("time", "event", "name", "start", "end")}
            entries.append(_block(span["name"], (span["start"], span["end"]), tid, start, arguments))
    publishes = {"sync": "publish"} if pool_of(track.place) == "trainer" else {}
    for state, times in track.waits.items():
        entries += [_block(publishes.get(state, state), interval, number * 100, start, {}) for interval in times]
    return entries


def lanes(spans: Iterable[Event]) -> list[list[Event]]:
    """The spans distributed over lanes so that two spans of one lane are disjoint, as trace viewers need."""
    spread: list[list[Event]] = []
    for span in sorted(spans, key=lambda s: s["start"]):
        free = next((lane for lane in spread if lane[-1]["end"] <= span["start"]), None)
        if free is None:
            spread.append([span])
        else:
            free.append(span)
    return spread


def _block(name: str, interval: Interval, tid: int, start: float, arguments: dict[str, Any]) -> dict[str, Any]:
    begin, end = ((moment - start) * MICROSECONDS for moment in interval)
    return {"name": name, "ph": "X", "pid": 1, "tid": tid, "ts": begin, "dur": end - begin, "args": arguments}


def _instant(event: Event, start: float) -> dict[str, Any]:
    kind = event["event"]
    label = f"{kind} {event.get('version', event.get('step', ''))} {event.get('state', '')}".strip()
    arguments = {k: v for k, v in event.items() if k not in ("time", "event")}
    when = (event["time"] - start) * MICROSECONDS
    return {"name": label, "ph": "i", "s": "g", "pid": 1, "tid": 0, "ts": when, "args": arguments}


def main() -> None:
    parser = argparse.ArgumentParser(description="events.jsonl of a run directory → timeline.json")
    parser.add_argument("run", type=Path, help="run directory")
    run = parser.parse_args().run
    try:
        write_timeline(run / "events.jsonl", run / "timeline.json")
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    sys.stdout.write(f"{run / 'timeline.json'}\n")


if __name__ == "__main__":
    main()
