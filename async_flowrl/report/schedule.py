"""Timeline of a run for its report: when each worker was busy or waited.

A few windows of steps have exact bars; the whole run has shares of time, or exact bars if there are few.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from async_flowrl.observability.events import Event
from async_flowrl.observability.intervals import Interval
from async_flowrl.observability.ledger import pool_of
from async_flowrl.observability.timeline import Track
from async_flowrl.report.records import Records
from async_flowrl.report.series import chosen

Numbers = npt.NDArray[np.float64]
# Steps in a window of exact bars.
MAX_STEPS = 6
# Most workers that are shown; of more, evenly spaced ones are taken.
MAX_PLACES = 24
# Most bars of one worker in a view; the shortest ones are left out.
MAX_BARS = 240
# The whole run is shown with exact bars if all workers together have at most this many.
MAX_EXACT = 1_500
# Equal parts of the whole run for which shares of time are computed.
BINS_PER_RUN = 160
# Most steps that are labelled.
MAX_STEP_NAMES = 2_000
# Most events that are marked; of more, evenly spaced ones are taken.
MAX_MARKS = 200
# Kind of an event that is marked on the timeline → what the mark says, from the event's fields.
MARKED = {
    "fault": "{worker}: {kind}: {message}",
    "worker_joined": "{worker} joined, rollout workers: {workers}",
    "worker_left": "{worker} left ({reason}), rollout workers: {workers}",
    "rollback": "back to the checkpoint of step {step}",
    "stall": "nothing happened for {seconds:.0f} s",
    "skipped": "a group of step {step} has no reward: {message}",
    "hacking": "{curve} has fallen since version {since}",
}


def timeline_of(run: Records) -> dict[str, Any] | None:
    """The timeline as a dictionary; None if no worker was recorded. All times are seconds since the first step began.

    `views` are parts of the run; each has one lane per shown worker, with `bars` [start, end, state] or `bins` (state →
    its share of the time in each of BINS_PER_RUN parts). `marks` are events, `steps` are [number, start, end].
    """
    if not run.workers:
        return None
    start, end = run.window
    shown = chosen(run.tracks, MAX_PLACES)

    def view(title: str, window: Interval, lane: Callable[[Track, Interval, float], dict[str, Any]]) -> dict[str, Any]:
        lanes = [{"place": t.place, "pool": pool_of(t.place), **lane(t, window, start)} for t in shown]
        return {"title": title, "start": window[0] - start, "end": window[1] - start, "lanes": lanes}

    marks = [_mark(event, start) for event in run.history if event["event"] in MARKED]
    views = [view(title, window, _bars) for title, window in _windows(run)]
    moments = [start, end, *(start + mark["time"] for mark in marks)]
    whole = min(moments), max(moments)
    if sum(len(part) for track in shown for part in track.states(whole).values()) <= MAX_EXACT:
        views.append(view("The whole run", whole, _bars))
    elif end > start:
        views.append(view("The whole run, shares of time", whole, _bins))
    return {
        "views": views,
        "marks": chosen(marks, MAX_MARKS),
        "mark_count": len(marks),
        "steps": [
            [int(e["step"]), *(round(e[key] - start, 4) for key in ("started", "ended"))]
            for e in chosen(run.step_events, MAX_STEP_NAMES)
        ],
        "workers": len(run.workers),
        "shown": len(shown),
    }


def _windows(run: Records) -> list[tuple[str, Interval]]:
    steps = run.step_events
    parts = {"Steps": 0}
    if (last := len(steps) - MAX_STEPS) > 0:
        parts = {"Middle": last // 2, "First steps": 0, "Last steps": last}
    windows = []
    for name, at in parts.items():
        if part := steps[at : at + MAX_STEPS]:
            title = f"{name}: {part[0]['step']} to {part[-1]['step']}"
            windows.append((title, (float(part[0]["started"]), float(part[-1]["ended"]))))
    return windows


def _bars(track: Track, window: Interval, origin: float) -> dict[str, Any]:
    bars = sorted((a, b, state) for state, part in track.states(window).items() for a, b in part)
    if len(bars) > MAX_BARS:
        # The shortest bars would be too narrow to see.
        bars = sorted(sorted(bars, key=lambda bar: (bar[0] - bar[1], bar[0]))[:MAX_BARS])
    return {"bars": [[round(a - origin, 4), round(b - origin, 4), state] for a, b, state in bars]}


def _bins(track: Track, window: Interval, _origin: float) -> dict[str, Any]:
    edges = np.linspace(*window, BINS_PER_RUN + 1)
    return {"bins": {state: _covered(part, edges).round(2).tolist() for state, part in track.states(window).items()}}


def _covered(part: Sequence[Interval], edges: Numbers) -> Numbers:
    moments = np.ravel(part)
    inside = np.arange(len(moments)) % 2  # 1 from the start of an interval to its end
    seconds = np.cumsum(inside * np.diff(moments, prepend=moments[0]))
    return np.diff(np.interp(edges, moments, seconds)) / np.diff(edges)


def _mark(event: Event, origin: float) -> dict[str, Any]:
    text = " ".join(MARKED[event["event"]].format_map(defaultdict(str, event)).split())[:300]
    return {"time": round(event["time"] - origin, 3), "kind": event["event"], "text": text}
