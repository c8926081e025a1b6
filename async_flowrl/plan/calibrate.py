"""Calibration: reads the durations (laws), layout and sizes of a run from the records in its directory.

`calibrate` returns them as a `Run` for `simulate`; `actual` measures what the run itself took. Only files are read:
neither the model nor the rewards of the run's configuration are imported.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from async_flowrl.config.compose import read_config
from async_flowrl.config.reward_pools import SHARED, reward_pools
from async_flowrl.config.schema import Config
from async_flowrl.config.shared import SHARED as ONE_POOL
from async_flowrl.observability.events import Event, effective, read_events
from async_flowrl.observability.intervals import intersect, length
from async_flowrl.observability.ledger import place_of, pool_of
from async_flowrl.observability.pool_size import CHANGES
from async_flowrl.observability.summary import WARM_UP_STEPS, last_attempt
from async_flowrl.observability.timeline import tracks
from async_flowrl.plan.laws import Law
from async_flowrl.plan.ticket_times import Batches, at_mean_cost, generation_times, group_costs, per_call
from async_flowrl.plan.turns_taken import finish_times, ticket_times, update_times
from async_flowrl.plan.work import EvaluationWork, Layout, Work, largest_share
from async_flowrl.tickets.arithmetic import parts_per_group
from async_flowrl.tickets.table import EVALUATION

MIN_SLOWNESS = 1.15
"""A worker is slow if its tickets take more than this many times those of the middle worker."""
MIN_TICKETS = 4
"""Fewest tickets of a worker with which it can be called slow."""


@dataclass(frozen=True)
class Run:
    """Inputs of a simulation, measured in a finished or running run."""

    config: Config
    work: Work
    layout: Layout
    began: int
    """First step of the last attempt: 0, or the step from which the run was resumed."""
    steps: int
    """Steps that the last attempt has finished so far."""
    resized: bool = False
    """Whether rollout workers joined or left for good; `layout` has rollout.num_workers in any case."""


@dataclass(frozen=True)
class Actual:
    """Measured speed of a run over some of its steps."""

    step_seconds: float
    busy: Mapping[str, float]
    """Pool → share of the time that its workers were busy, from 0 to 1."""


class NothingToLearn(ValueError):
    """The run is too short, or its records lack the timings or tickets that a simulation needs."""


def calibrate(run: Path, *, last: int | None = None) -> Run:
    """Returns what the steps of the last attempt took, from the end of its warm-up to step `last` - 1.

    `last` None means to the end of the run. Raises NothingToLearn if these steps have no timings or tickets, and
    ValueError if the directory is not that of a run or a file in it is broken.
    """
    config, began, history, metrics = load(run)
    one_pool = config.placement == ONE_POOL
    first = began + WARM_UP_STEPS
    resized = any(event["event"] in CHANGES for event in history)
    stop = last if last is not None else config.total_steps
    lines = [line for line in metrics if first <= line["step"] < stop and "timing/update" in line]
    if not lines:
        raise NothingToLearn(f"{run} has no step from {first} to {stop} with its timing in metrics.jsonl")
    history = within(history, first, stop)
    batches = batches_of(config)
    times = per_call(ticket_times(history) if one_pool else generation_times(history))
    costs = group_costs(history, times, batches)
    tickets = at_mean_cost(times, costs, batches)
    if not tickets:
        raise NothingToLearn(f"{run} has no ticket of steps {first} to {stop} in events.jsonl")
    finish = fmean(finish_times(history) or [0.0])
    parts = config.prompts_per_step // config.trainer.updates_per_batch * parts_per_group(config)
    # The update took as long as the rank with the most parts. Dividing by its share gives the time of a single rank.
    share = largest_share(parts, config.trainer.num_workers)
    per_group = [
        (line["step"], max(0.0, line["timing/update"] - finish) / config.prompts_per_step / share) for line in lines
    ]
    if one_pool and not (per_group := update_times(history, config.prompts_per_step)):
        raise NothingToLearn(f"{run} has no span of training of steps {first} to {stop} in events.jsonl")
    rest = [max(0.0, x["timing/step"] - x["timing/wait_rollout"] - x["timing/update"]) for x in lines]
    slow = slow_places(tickets)
    scores = score_times(history, [pool.name for pool in reward_pools(config.reward)])
    work = Work(
        prompts_per_step=config.prompts_per_step,
        tickets_per_group=batches.tickets_per_group,
        tickets_per_batch=batches.size,
        costs=tuple(costs.values()),
        group_size=config.group_size,
        parts=parts,
        # Durations of slow workers are scaled to the middle worker's speed; the layout holds the slowness factors.
        generate=Law.measured([seconds / slow.get(place, 1.0) for place, seconds in tickets]),
        update=Law.measured([seconds / step_cost(costs, step, config.prompts_per_step) for step, seconds in per_group]),
        finish=Law(finish),
        score=Law.measured(scores.pop(SHARED, [])),
        own_scores={pool: Law.measured(times) for pool, times in scores.items()},
        stage=Law.measured(rest),
        deliver=Law.measured(delivery_times(history)),
        evaluation=evaluation_work(config, history, slow),
        ticket_bytes=payload_bytes(history),
        adapter_bytes=adapter_bytes(run),
    )
    return Run(config, work, layout_of(config, slow), began, len(metrics), resized)


def evaluation_work(config: Config, history: Sequence[Event], slow: Mapping[str, float]) -> EvaluationWork | None:
    """Returns the work of the run's evaluations; None if it makes none during training, or none was measured.

    The evaluations of version 0 are left out; one of them may be of the baseline, with other sampling. `slow` is as for
    `layout_of`.
    """
    of_evaluations = (ticket_times if config.placement == ONE_POOL else generation_times)(history, kind=EVALUATION)
    times = [time for time in of_evaluations if time.step > 0]
    if config.evaluate.every == 0 or not times:
        return None
    # A ticket that was lost is made again, with the same ordinal.
    evaluated = Counter(step for step, _ in {(time.step, time.ordinal) for time in times})
    law = Law.measured([time.seconds / slow.get(place_of(time.worker), 1.0) for time in times])
    return EvaluationWork(config.evaluate.every, max(evaluated.values()), law)


def batches_of(config: Config) -> Batches:
    per_group = config.group_size // config.images_per_ticket
    return Batches(config.rollout.tickets_per_batch, per_group)


def step_cost(costs: Mapping[int, float], step: int, groups: int) -> float:
    """Returns the mean relative cost of the step's groups; groups that are not in `costs` count as 1."""
    return fmean(costs.get(group, 1.0) for group in range(step * groups, (step + 1) * groups))


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


def layout_of(config: Config, slow: Mapping[str, float]) -> Layout:
    """Returns the run's layout; `slow` is worker place (`rollout-0`) → factor on the durations of its tickets."""
    pools = {pool.name: pool.workers for pool in reward_pools(config.reward)}
    places = [slow.get(f"rollout-{index}", 1.0) for index in range(config.rollout.num_workers)]
    return Layout(
        rollout=config.rollout.num_workers,
        trainer=config.trainer.num_workers,
        reward=pools.pop(SHARED, 0),
        own_rewards=pools,
        max_staleness=config.max_staleness,
        hand_over=config.hand_over,
        slow=tuple(places) if slow else (),
        placement=config.placement,
    )


def within(history: Sequence[Event], first: int, stop: int) -> list[Event]:
    """Returns the events from the beginning of step `first` to the end of step `stop` - 1; empty without such steps."""
    steps = [event for event in history if event["event"] == "step" and first <= event["step"] < stop]
    if not steps:
        return []
    begin, end = steps[0]["started"], steps[-1]["ended"]
    return [event for event in history if begin <= event["time"] <= end]


def slow_places(tickets: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Returns slow worker place → factor on its durations; empty with fewer than two workers to compare."""
    by_place: dict[str, list[float]] = {}
    for place, seconds in tickets:
        by_place.setdefault(place, []).append(seconds)
    medians = {place: median(times) for place, times in by_place.items() if len(times) >= MIN_TICKETS}
    if len(medians) < 2 or median(medians.values()) <= 0:
        return {}
    middle = sorted(medians.values())[(len(medians) - 1) // 2]
    return {place: value / middle for place, value in medians.items() if value > MIN_SLOWNESS * middle}


def score_times(history: Iterable[Event], pools: Sequence[str]) -> dict[str, list[float]]:
    """Returns reward pool → seconds that one of its workers was busy with one group, for each group."""
    began: dict[str, float] = {}
    times: dict[str, list[float]] = {pool: [] for pool in pools}
    for event in history:
        if event["event"] == "state" and (pool := pool_of(event["worker"])) in times:
            if event["worker"] in began:
                times[pool].append(event["time"] - began.pop(event["worker"]))
            if event["state"] == "busy":
                began[event["worker"]] = event["time"]
    return times


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


def actual(run: Path, *, first: int | None = None) -> Actual | None:
    """Measures the run from step `first` on, without the last steps, for which generation had no more work.

    `first` None means after the warm-up. Returns None if no step is left.
    """
    config, began, history, _ = load(run)
    first = began + WARM_UP_STEPS if first is None else first
    steps = {event["step"]: event for event in history if event["event"] == "step"}
    done = [step for step in sorted(steps) if first <= step <= max(steps) - config.max_staleness]
    if not done:
        return None
    window = steps[done[0]]["started"], steps[done[-1]]["ended"]
    seconds = window[1] - window[0]
    busy: dict[str, list[float]] = {}
    for track in tracks(history):
        busy.setdefault(pool_of(track.place), []).append(length(intersect(track.busy, [window])) / seconds)
    return Actual(seconds / len(done), {pool: fmean(shares) for pool, shares in busy.items()})


def payload_bytes(history: Sequence[Event]) -> int:
    """Returns the largest number of bytes recorded for a ticket (images and trajectory); 0 if none was recorded."""
    return max((event["bytes"] for event in history if event["event"] == "span" and "bytes" in event), default=0)


def adapter_bytes(run: Path) -> int:
    """Returns the bytes of one version, from the run's summary.json; 0 without that file."""
    path = run / "summary.json"
    if not path.is_file():
        return 0
    sync = json.loads(path.read_text()).get("sync", {})
    return int(sync.get("bytes", 0) / max(1, sync.get("publishes", 0)))
