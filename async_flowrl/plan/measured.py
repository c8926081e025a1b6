"""Measurements of a run, from the records in its directory: tickets, updates, scores, deliveries and steps.

Only files are read: neither the model nor the rewards of the run's configuration are imported.
"""

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from async_flowrl.config.compose import read_config
from async_flowrl.config.schema import Config
from async_flowrl.observability.events import Event, effective, read_events
from async_flowrl.observability.intervals import intersect, length, union
from async_flowrl.observability.ledger import place_of, pool_of
from async_flowrl.observability.summary import WARM_UP_STEPS, last_attempt
from async_flowrl.observability.timeline import tracks
from async_flowrl.tickets.table import TRAIN, State


class NothingToLearn(ValueError):
    """The run is too short, or its records lack the timings or tickets that are asked for."""


@dataclass(frozen=True)
class Actual:
    """Measured speed of a run over some of its steps."""

    step_seconds: float
    busy: Mapping[str, float]
    """Pool → share of the time that its workers were busy, from 0 to 1."""


def load(run: Path) -> tuple[Config, int, list[Event], list[dict[str, Any]]]:
    """Returns the configuration, and the first step, events and metrics since the run was last resumed.

    The configuration's placement is replaced by the one that the events record for these steps. They differ if the run
    is being resumed with another placement, because the new configuration is already written. Raises ValueError if a
    file is missing or broken.
    """
    try:
        whole = effective(read_events(run / "events.jsonl"))
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename} is missing: {run} is not the directory of a run") from error
    config, (first, attempt) = read_config(run / "config.yaml"), last_attempt(whole)
    placements = [event["placement"] for event in whole if event["event"] == "inputs" and "placement" in event]
    config = replace(config, placement=(placements or [config.placement])[-1])
    return config, first, list(attempt), [line for line in lines if line["step"] >= first]


def within(history: Sequence[Event], first: int, stop: int) -> list[Event]:
    """Returns the events from the beginning of step `first` to the end of step `stop` - 1; empty without such steps."""
    steps = [event for event in history if event["event"] == "step" and first <= event["step"] < stop]
    if not steps:
        return []
    begin, end = steps[0]["started"], steps[-1]["ended"]
    return [event for event in history if begin <= event["time"] <= end]


def actual(run: Path) -> Actual | None:
    """Measures the run after its warm-up, without the last steps, for which generation had no more work.

    Returns None if no step is left.
    """
    config, began, history, _ = load(run)
    steps = {event["step"]: event for event in history if event["event"] == "step"}
    done = [step for step in sorted(steps) if began + WARM_UP_STEPS <= step <= max(steps) - config.max_staleness]
    if not done:
        return None
    window = steps[done[0]]["started"], steps[done[-1]]["ended"]
    seconds = window[1] - window[0]
    busy: dict[str, list[float]] = {}
    for track in tracks(history):
        busy.setdefault(pool_of(track.place), []).append(length(intersect(track.busy, [window])) / seconds)
    return Actual(seconds / len(done), {pool: fmean(shares) for pool, shares in busy.items()})


def generation_seconds(history: Iterable[Event], steps: Container[int] | None = None) -> float:
    """Returns the seconds in which rollout workers made training tickets, summed; `steps` None means of all steps.

    A ticket's seconds run from its dispatch to its result, but begin with the worker's previous result if that is
    later: a worker gets its next ticket while it generates one.
    """
    started: dict[int, float] = {}
    last: dict[str | None, float] = {}
    total = 0.0
    for event in history:
        if event["event"] != "ticket":
            continue
        ordinal = event["ordinal"] if event["kind"] == TRAIN else ~event["ordinal"]
        if event["state"] == State.RUNNING:
            started[ordinal] = event["time"]
        elif event["state"] == State.SCORING and ordinal in started:
            began = max(started.pop(ordinal), last.get(event["worker"], 0.0))
            if event["kind"] == TRAIN and (steps is None or event["step"] in steps):
                total += event["time"] - began
            last[event["worker"]] = event["time"]
        elif event["state"] == State.PENDING:
            started.pop(ordinal, None)
    return total


def span_seconds(history: Iterable[Event], pool: str) -> float:
    """Returns the seconds in which the workers of a pool computed by their own spans, summed over the workers.

    With `placement=shared` only the spans say it: between a ticket's dispatch and its result its process may train.
    """
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in history:
        if event["event"] == "span" and pool_of(event["worker"]) == pool:
            spans.setdefault(place_of(event["worker"]), []).append((event["start"], event["end"]))
    return sum(length(union(own)) for own in spans.values())


def score_seconds(history: Iterable[Event], pools: Sequence[str]) -> dict[str, float]:
    """Returns reward pool → seconds in which its workers were busy, summed over the workers."""
    began: dict[str, float] = {}
    seconds = dict.fromkeys(pools, 0.0)
    for event in history:
        if event["event"] == "state" and (pool := pool_of(event["worker"])) in seconds:
            if event["worker"] in began:
                seconds[pool] += event["time"] - began.pop(event["worker"])
            if event["state"] == "busy":
                began[event["worker"]] = event["time"]
    return seconds


def delivery_times(history: Iterable[Event]) -> list[float]:
    """Returns the seconds from the staging of a version to each worker's acknowledgement of it."""
    staged: dict[int, float] = {}
    acknowledged: list[tuple[int, float]] = []
    for event in history:
        if event["event"] == "version" and event["stream"] == "policy":
            if event["state"] == "staged":
                staged[event["version"]] = event["time"]
            elif event["state"] == "acknowledged":
                acknowledged.append((event["version"], event["time"]))
    # A version that is acknowledged after the next one was staged was delivered again, for an evaluation.
    return [
        max(0.0, time - staged[v]) for v, time in acknowledged if v in staged and time < staged.get(v + 1, time + 1)
    ]
