"""Durations of work in a run with `placement=shared`: from the spans in which it ran, without waits for its turn.

`calibrate` uses them. A ticket's dispatch and result say little there, as training may come between.
"""

from collections.abc import Iterable

from async_flowrl.observability.events import Event
from async_flowrl.observability.intervals import length, union
from async_flowrl.observability.ledger import place_of, pool_of
from async_flowrl.plan.ticket_times import TicketTime, batch_in
from async_flowrl.tickets.table import TRAIN, State

BESIDE_GROUPS = ("optimizer", "probe")
"""Spans of a trainer rank that belong to the end of an optimizer step, or to its later measurement, not to a group."""


def ticket_times(history: Iterable[Event], *, kind: str = TRAIN) -> list[TicketTime]:
    """Returns the seconds of every ticket of this kind that was generated; the first of a batch has those of all."""
    spans: dict[tuple[str, int], tuple[float, float]] = {}
    batches: dict[tuple[str, int], tuple[int, ...]] = {}
    last: dict[str, float] = {}
    times = []
    for event in history:
        if event["event"] == "span" and "ordinal" in event:
            key = event["worker"], event["ordinal"]
            start, end = spans.get(key, (event["start"], event["end"]))
            spans[key] = min(start, event["start"]), max(end, event["end"])
        elif event["event"] == "ticket" and event["state"] == State.RUNNING:
            batches[event["kind"], event["ordinal"]] = batch_in(event)
        elif event["event"] == "ticket" and event["state"] == State.SCORING:
            worker, batch = event["worker"], batches.get((event["kind"], event["ordinal"]), ())
            start, end = spans.pop((worker, event["ordinal"]), (0.0, 0.0))
            if event["kind"] == kind and end > 0:
                seconds = max(0.0, end - max(start, last.get(worker, 0.0)))
                times.append(TicketTime(worker, event["ordinal"], event["step"], seconds, batch))
            last[worker] = max(end, last.get(worker, 0.0))
    return times


def finish_times(history: Iterable[Event]) -> list[float]:
    """Returns the seconds of each step in which gradient sums are added up and the optimizer steps are taken.

    Ranks wait for each other when they add up; the times are those of the rank that waited least in the step.
    """
    times, ranks = list[float](), dict[str, float]()
    for event in history:
        if event["event"] == "step" and ranks:
            times.append(min(ranks.values()))
            ranks = {}
        elif event["event"] == "span" and event["name"] == "optimizer" and pool_of(event["worker"]) == "trainer":
            place = place_of(event["worker"])
            ranks[place] = ranks.get(place, 0.0) + event["end"] - event["start"]
    return times


def update_times(history: Iterable[Event], groups: int) -> list[tuple[int, float]]:
    """Returns (step, seconds that a single rank would take for one of its `groups`, without the optimizer).

    The ranks' spans of a step are added up; they are recorded before the event of the step.
    """
    times, spans = [], dict[str, list[tuple[float, float]]]()
    for event in history:
        if event["event"] == "step" and spans:
            times.append((event["step"], sum(length(union(own)) for own in spans.values()) / groups))
            spans = {}
        elif event["event"] == "span" and pool_of(event["worker"]) == "trainer" and event["name"] not in BESIDE_GROUPS:
            spans.setdefault(place_of(event["worker"]), []).append((event["start"], event["end"]))
    return times
