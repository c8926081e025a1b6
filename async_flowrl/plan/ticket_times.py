"""Durations of tickets in a run, from its events, also of those made in batches and of images of different sizes.

`calibrate` uses them; `turns_taken` has those of `placement=shared`.
"""

from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, linear_regression

from async_flowrl.observability.events import Event
from async_flowrl.observability.ledger import place_of
from async_flowrl.tickets.table import TRAIN, State

SAME_COST = 1.05
"""Groups are alike if the costliest takes at most this many times the cheapest."""
MIN_TIMED = 8
"""Fewest tickets with counted FLOPs from which durations are fitted."""


@dataclass(frozen=True)
class TicketTime:
    """Duration of one ticket, or of a call that made it with others."""

    worker: str
    ordinal: int
    step: int
    seconds: float
    batch: tuple[int, ...] = ()
    """Ordinals of the tickets of its call in their order, itself included; empty if a call has one ticket."""


@dataclass(frozen=True)
class Batches:
    """Numbers of tickets."""

    size: int
    """Most tickets of one call."""
    tickets_per_group: int

    def group(self, ordinal: int) -> int:
        """Returns the number of the ticket's group in the run."""
        return ordinal // self.tickets_per_group


def generation_times(
    history: Iterable[Event], steps: Container[int] | None = None, *, kind: str = TRAIN
) -> list[TicketTime]:
    """Returns the seconds of every ticket of this kind that was generated; `steps` None means of all steps.

    The seconds run from the ticket's dispatch to its result, but begin with the worker's previous result if that is
    later: a worker gets its next ticket while it generates one. Of tickets of one batch the first has the time of all.
    """
    started: dict[tuple[str, int], tuple[float, str, tuple[int, ...]]] = {}
    last: dict[str | None, float] = {}
    times = []
    for event in history:
        if event["event"] != "ticket":
            continue
        key = event["kind"], event["ordinal"]
        if event["state"] == State.RUNNING:
            started[key] = event["time"], event["worker"], batch_in(event)
        elif event["state"] == State.SCORING and key in started:
            began, worker, batch = started.pop(key)
            if event["kind"] == kind and (steps is None or event["step"] in steps):
                seconds = event["time"] - max(began, last.get(worker, 0.0))
                times.append(TicketTime(worker, event["ordinal"], event["step"], seconds, batch))
            last[worker] = event["time"]
        elif event["state"] == State.PENDING:
            started.pop(key, None)
    return times


def batch_in(event: Event) -> tuple[int, ...]:
    """Returns `TicketTime.batch` from the event of a ticket that a worker has started."""
    return tuple(event.get("batch", ()))


def per_call(times: Iterable[TicketTime]) -> list[TicketTime]:
    """Returns one duration per call: the sum of its tickets' durations, divided by the number of tickets in the batch.

    A batch of which only some tickets were wanted was computed whole. `times` are in the order of the results.
    """
    calls: list[TicketTime] = []
    newest: dict[str, tuple[int, int]] = {}
    """Worker → (index of its last call in `calls`, place in the batch of that call's last result)."""
    for time in times:
        share = time.seconds / max(1, len(time.batch))
        place = time.batch.index(time.ordinal) if time.batch else 0
        index, before = newest.get(time.worker, (-1, -1))
        # The results of a call come in the order of its batch.
        if index >= 0 and time.batch == calls[index].batch and before < place:
            calls[index] = replace(calls[index], seconds=calls[index].seconds + share)
        else:
            index = len(calls)
            calls.append(replace(time, seconds=share))
        newest[time.worker] = index, place
    return calls


def group_costs(history: Iterable[Event], times: Sequence[TicketTime], batches: Batches) -> dict[int, float]:
    """Returns group of the run → relative duration of its tickets, with a mean of 1; empty if groups are alike.

    They differ with the sizes of the images: a ticket's duration is taken as a constant and a part in proportion to its
    FLOPs, both fitted to `times`. Empty also if no FLOPs were counted (compiled networks, vllm_omni), and with several
    tickets per batch, whose images have one size.
    """
    flops = {} if batches.size > 1 else group_flops(history, batches)
    timed = [(flops[group], time.seconds) for time in times if (group := batches.group(time.ordinal)) in flops]
    if len(timed) < MIN_TIMED or not _differ([work for work, _ in timed]):
        return {}
    per_flop, constant = linear_regression(*zip(*timed, strict=True))
    if per_flop <= 0:
        return {}
    seconds = {group: max(0.0, constant) + per_flop * work for group, work in flops.items()}
    mean = fmean(seconds.values())
    return {group: each / mean for group, each in seconds.items()} if _differ(seconds.values()) else {}


def _differ(values: Collection[float]) -> bool:
    return max(values) > SAME_COST * min(values)


def group_flops(history: Iterable[Event], batches: Batches) -> dict[int, float]:
    """Returns group of the run → FLOPs that were counted in the denoising of one of its tickets."""
    flops: dict[tuple[str, int], float] = {}
    counted: dict[int, float] = {}
    for event in history:
        if event["event"] == "span" and event["name"] == "generate" and event.get("flops"):
            flops[event["worker"], event["ordinal"]] = event["flops"]
        elif event["event"] == "ticket" and event["state"] == State.SCORING:
            counted_flops = flops.pop((event["worker"], event["ordinal"]), None)
            if counted_flops is not None and event["kind"] == TRAIN:
                counted[batches.group(event["ordinal"])] = counted_flops
    return counted


def at_mean_cost(times: Sequence[TicketTime], costs: dict[int, float], batches: Batches) -> list[tuple[str, float]]:
    """Returns (worker place, seconds) of each call, as if its images had the cost of the mean group."""
    return [(place_of(time.worker), time.seconds / costs.get(batches.group(time.ordinal), 1.0)) for time in times]
