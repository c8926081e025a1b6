"""summary.json: the run in numbers."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from async_flowrl.config.reward_pools import reward_pools
from async_flowrl.config.schema import Config
from async_flowrl.observability.events import Event, effective
from async_flowrl.observability.intervals import Interval, intersect, length, union
from async_flowrl.observability.ledger import pool_of
from async_flowrl.observability.metrics import Metrics
from async_flowrl.observability.mfu import utilisation
from async_flowrl.observability.pool_size import rollout_size
from async_flowrl.observability.result import tenths
from async_flowrl.observability.timeline import Track, tracks

WARM_UP_STEPS = 2
"""Steps before the steady state: the pipeline fills and caches are cold."""
MIN_GRADIENT_KEPT = 0.8
"""Share of the gradient that clip and mask should leave; below it the run warns."""


@dataclass(frozen=True)
class Outcome:
    """The part of the summary that is in no file: what the controller counted."""

    wall_seconds: float
    weights_digest: str
    tickets: Mapping[str, int]
    """issued, trained, skipped, failed, retried, duplicate."""
    pools: Mapping[str, Mapping[str, float]]
    """Totals of the PoolLedger."""
    sync: Mapping[str, Any]
    """publishes, bytes, seconds, {trainer,worker}_stall_seconds, transport, retries, corrupt, fallbacks."""
    peak: float | None = None
    """FLOP/s of a worker's device, where it is known."""


@dataclass(frozen=True)
class Steady:
    """The stretch in which the pipeline is full: after the warm-up, before generation has nothing left to do."""

    window: Interval
    steps: int
    generation: list[Interval]
    """When any rollout worker worked, inside the window."""
    update: list[Interval]
    """When the first trainer rank worked, inside the window."""
    generation_per_step: float
    """Seconds a step's generation keeps one rollout worker busy, spread evenly over the workers."""

    @property
    def update_per_step(self) -> float:
        return length(self.update) / self.steps

    @property
    def seconds_per_step(self) -> float:
        return (self.window[1] - self.window[0]) / self.steps

    @property
    def overlap(self) -> float:
        return length(intersect(self.generation, self.update))

    @property
    def overlap_share(self) -> float | None:
        least = min(length(self.generation), length(self.update))
        return self.overlap / least if least > 0 else None

    @property
    def bound(self) -> float:
        """max(G, T): no schedule of these two pools takes less per step."""
        return max(self.generation_per_step, self.update_per_step)


def summarise(config: Config, metrics: Sequence[Metrics], events: Iterable[Event], outcome: Outcome) -> dict[str, Any]:
    """The keys of summary.json. What cannot be known (too few steps, say) is null.

    After a resume, steps, images, rewards and staleness are of the whole run; times and rates are of the time since.
    """
    history = effective(events)
    _, attempt = last_attempt(history)
    workers = tracks(attempt)
    steady = steady_state(workers, attempt, config.max_staleness)
    images = [int(line.get("images", config.prompts_per_step * config.group_size)) for line in metrics]
    began = process_began(history)
    made = sum(count for count, line in zip(images, metrics, strict=True) if line["step"] >= began)
    kept = gradient_kept(metrics)
    trained = tenths(metrics)
    return {
        "steps": len(metrics),
        "images": sum(images),
        "wall_seconds": outcome.wall_seconds,
        "images_per_s": made / outcome.wall_seconds if outcome.wall_seconds > 0 else None,
        "steady_images_per_s": _steady_rate(attempt, sum(images) / max(1, len(images))),
        "mode": config.mode_name,
        "max_staleness": config.max_staleness,
        "placement": config.placement,
        "workers": {
            "rollout": config.rollout.num_workers,
            "trainer": config.trainer.num_workers,
            **{pool.name: pool.workers for pool in reward_pools(config.reward)},
        },
        "rollout_size": rollout_size(config, attempt),
        "gpus_per_worker": {
            "rollout": config.rollout.gpus_per_worker,
            "trainer": config.trainer.gpus_per_worker,
            **{pool.name: pool.gpus_per_worker for pool in reward_pools(config.reward)},
        },
        **staleness(metrics, config.trainer.updates_per_batch),
        "weights_digest": outcome.weights_digest,
        "tickets": dict(outcome.tickets),
        "faults": dict(sorted(Counter(event["kind"] for event in history if event["event"] == "fault").items())),
        "pools": {pool: dict(seconds) for pool, seconds in outcome.pools.items()},
        "sync": dict(outcome.sync),
        "overlap": {
            "seconds": length(intersect(_pool(workers, "rollout"), _pool(workers, "trainer"))),
            "share": steady.overlap_share if steady else None,
        },
        "bound": {
            "generation": steady.generation_per_step if steady else None,
            "update": steady.update_per_step if steady else None,
            "seconds_per_step": steady.bound if steady else None,
        },
        "efficiency": steady.bound / steady.seconds_per_step if steady else None,
        "flops_per_s": (rates := flops_per_second(workers, steady.window) if steady else {}),
        "mfu": {pool: utilisation(rate, 1.0, outcome.peak) for pool, rate in rates.items()},
        "gradient_kept": kept,
        "skipped": skipped(metrics),
        "warnings": warnings_of(metrics),
        "reward_first": trained[0] if trained else None,
        "reward_last": trained[1] if trained else None,
    }


def flops_per_second(workers: Sequence[Track], window: Interval) -> dict[str, float]:
    """Per pool that counts them: what a worker's network computes per second of wall clock, on average."""
    rates: dict[str, list[float]] = {}
    for track in workers:
        inside = [span["flops"] for span in track.spans if "flops" in span and window[0] <= span["end"] <= window[1]]
        rates.setdefault(pool_of(track.place), []).append(sum(inside) / (window[1] - window[0]))
    return {pool: sum(each) / len(each) for pool, each in rates.items() if sum(each) > 0}


def last_attempt(history: Sequence[Event]) -> tuple[int, Sequence[Event]]:
    """(step at which the run was last resumed, the events since then)."""
    for index in range(len(history) - 1, -1, -1):
        if history[index]["event"] == "rollback":
            return int(history[index]["step"]), history[index + 1 :]
    return 0, history


def process_began(history: Sequence[Event]) -> int:
    """The step from which the last process trained: 0, or that of the rollback by which it resumed the run.

    A rollback after the death of a trainer rank, which the same process goes on from, does not count.
    """
    starts = [later for later, event in enumerate(history[1:], start=1) if event["event"] == "inputs"]
    before = history[starts[-1] - 1] if starts else {"event": "none"}
    return int(before["step"]) if before["event"] == "rollback" else 0


def steady_state(workers: Sequence[Track], history: Sequence[Event], max_staleness: int) -> Steady | None:
    """The steady part of a run; None if the run is too short to have one."""
    steps = sorted((event for event in history if event["event"] == "step"), key=lambda event: int(event["step"]))
    inner = steps[WARM_UP_STEPS : len(steps) - max_staleness]
    if not inner:
        return None
    window = inner[0]["started"], inner[-1]["ended"]
    rollouts = [track for track in workers if pool_of(track.place) == "rollout"]
    worked = sum(length(intersect(track.busy, [window])) for track in rollouts)
    return Steady(
        window=window,
        steps=len(inner),
        generation=intersect(_pool(workers, "rollout"), [window]),
        update=intersect(_pool(workers, "trainer", first_only=True), [window]),
        generation_per_step=worked / len(inner) / max(1, len(rollouts)),
    )


def staleness(metrics: Sequence[Metrics], updates_per_batch: int = 1) -> dict[str, float]:
    """Age of the samples when they were trained on, in policy versions and in optimizer steps."""
    trained = [line for line in metrics if line.get("staleness/max") is not None]
    largest = max((line["staleness/max"] for line in trained), default=0)
    mean = sum(line["staleness/mean"] for line in trained) / max(1, len(trained))
    # The last optimizer step of a batch trains on samples that are updates_per_batch - 1 further behind.
    behind = max(largest * updates_per_batch + updates_per_batch - 1, 0) if metrics else 0
    return {"staleness_max": largest, "staleness_mean": mean, "staleness_updates_max": behind}


def gradient_kept(metrics: Sequence[Metrics]) -> dict[str, float]:
    """By age: the share of (sample, step) pairs with nonzero advantage whose gradient survived clip and mask."""
    kept: dict[str, float] = {}
    total: dict[str, float] = {}
    for line in metrics:
        for name, value in line.items():
            kind, _, age = name.partition("/")
            if kind == "kept":
                kept[age] = kept.get(age, 0.0) + value
            elif kind == "kept_of":
                total[age] = total.get(age, 0.0) + value
    return {age: kept.get(age, 0.0) / total[age] for age in sorted(total, key=int) if total[age]}


def skipped(metrics: Sequence[Metrics]) -> dict[str, int]:
    """Training tickets without a score in the whole run, steps that had some, and steps that had nothing else; and how
    often a group was trained without an optional term."""
    tickets = [int(line.get("tickets_skipped") or 0) for line in metrics]
    nothing = sum(line.get("reward/mean") is None for line, count in zip(metrics, tickets, strict=True) if count)
    return {
        "tickets": sum(tickets),
        "steps": sum(count > 0 for count in tickets),
        "steps_without_reward": nothing,
        "optional_terms": sum(groups_without(metrics).values()),
    }


def groups_without(metrics: Sequence[Metrics]) -> dict[str, int]:
    """By optional term, the groups that were trained without its score."""
    counts: dict[str, int] = {}
    for line in metrics:
        for key, value in line.items():
            term = key.removeprefix("reward/").removesuffix("/missing")
            if key == f"reward/{term}/missing" and value:
                counts[term] = counts.get(term, 0) + int(value)
    return counts


def warnings_of(metrics: Sequence[Metrics]) -> list[str]:
    """What the lines of metrics.jsonl give cause for: skipped tickets, terms left out, gradient clipped away."""
    kept, counts = gradient_kept(metrics), skipped(metrics)
    lost = [
        f"{counts['tickets']} tickets in {counts['steps']} steps were skipped, as their rewards could not be had; "
        f"{counts['steps_without_reward']} of these steps trained nothing (see the events `skipped` in events.jsonl)"
    ]
    without = [
        f"{count} groups were trained without the term {term}, which is not required and could not be had (see the "
        "events `unscored` in events.jsonl)"
        for term, count in groups_without(metrics).items()
    ]
    return [
        *(lost if counts["tickets"] else []),
        *without,
        *(
            f"only {share:.0%} of the gradient survived clip and mask for samples {age} versions old; widen "
            "algorithm.clip_range or lower max_staleness"
            for age, share in kept.items()
            if share < MIN_GRADIENT_KEPT
        ),
    ]


def _pool(workers: Sequence[Track], pool: str, *, first_only: bool = False) -> list[Interval]:
    """When any place of the pool worked (or only its first place)."""
    members = [track for track in workers if pool_of(track.place) == pool]
    return union(interval for track in (members[:1] if first_only else members) for interval in track.busy)


def _steady_rate(history: Sequence[Event], images_per_step: float) -> float | None:
    """Training images per second from the end of the warm-up to the end of the last step."""
    ends = [event["ended"] for event in history if event["event"] == "step"]
    if len(ends) <= WARM_UP_STEPS or ends[-1] <= ends[WARM_UP_STEPS - 1]:
        return None
    return (len(ends) - WARM_UP_STEPS) * images_per_step / float(ends[-1] - ends[WARM_UP_STEPS - 1])
