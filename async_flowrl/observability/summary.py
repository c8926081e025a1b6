"""summary.json: the numbers of a finished run; docs/metrics.md explains the keys.

Two of them compare a run with the best possible one: its *bound* is max(G, T) per step (see docs/glossary.md), G + T
with `placement=shared`, and its *efficiency* is that bound divided by the measured seconds per step.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from async_flowrl.config.curves import best_curve
from async_flowrl.config.placement import placement_of
from async_flowrl.config.schema import Config
from async_flowrl.config.scoring_pools import scoring_pools, served_terms, server_pool
from async_flowrl.observability.evaluations import Evaluation, policy_versions, since_first
from async_flowrl.observability.events import Event, effective, step_window, steps_of
from async_flowrl.observability.hacking import alarms, best, notices
from async_flowrl.observability.intervals import Interval, intersect, length, union
from async_flowrl.observability.ledger import place_of, pool_of
from async_flowrl.observability.metrics import Metrics, by_age, missing_terms, version_of
from async_flowrl.observability.result import tenths
from async_flowrl.observability.statistics import CHANGE_FIELDS
from async_flowrl.observability.timeline import Track, by_pool, device_time, tracks, worked

# Steps at the start that rates leave out, because the pipeline is filling and caches are cold.
WARM_UP_STEPS = 2
# Events by which the size of a rollout pool changes.
CHANGES = ("worker_joined", "worker_left")
# The run warns if clipping and masking leave less than this share of the gradient.
MIN_GRADIENT_KEPT = 0.8

FLAT = (
    "the reward gave all images of a prompt the same score, for every prompt (steps in a row: {steps}), so there was "
    "nothing to learn: take a reward that tells them apart, other prompts, or more images per prompt (group_size)"
)


def summarise(
    config: Config,
    metrics: Sequence[Metrics],
    events: Iterable[Event],
    counted: Mapping[str, Any],
    peak: float | None = None,
) -> dict[str, Any]:
    """The content of summary.json. Values that are unknown, e.g. because there were too few steps, are None."""
    # `counted` has what the controller counts and no file holds, under the summary's keys, `wall_seconds` among them.
    # `peak` is the peak FLOP/s of one worker's device; None if it is unknown.
    # After a resume, steps, images, rewards and staleness cover the whole run; times and rates only the time since
    # then.
    history = effective(events)
    _, attempt = last_attempt(history)
    workers = tracks(attempt)
    images = [int(line.get("images", config.prompts_per_step * config.group_size)) for line in metrics]
    began = process_began(history)
    since = sum(count for count, line in zip(images, metrics, strict=True) if line["step"] >= began)
    first, last = tenths(metrics) or (None, None)
    configured = configured_pools(config)
    devices = device_time(workers, step_window(attempt)) if placement_of(config).together else {}
    return {
        "steps": version_of(metrics),
        "images": sum(images),
        "images_per_s": since / counted["wall_seconds"] if since and counted["wall_seconds"] > 0 else None,
        "steady_images_per_s": _steady_rate(attempt, sum(images) / max(1, len(images))),
        "mode": config.mode_name,
        "max_staleness": config.max_staleness,
        "placement": config.placement,
        "workers": {pool: workers for pool, (workers, _) in configured.items()},
        "rollout_size": rollout_size(config, attempt),
        "gpus_per_worker": {pool: gpus for pool, (_, gpus) in configured.items()},
        **staleness(metrics, config.trainer.updates_per_batch),
        "faults": dict(sorted(Counter(event["kind"] for event in history if event["event"] == "fault").items())),
        **counted,
        **steady_state(config, workers, attempt, peak),
        "memory": memory(metrics),
        "devices": dict.fromkeys(("sampled", "trained", "idle")) | devices,
        "swaps": sum(int(line.get("pool/rollout/swaps") or 0) for line in metrics),
        "gradient_kept": gradient_kept(metrics),
        "skipped": skipped(metrics),
        "warnings": warnings_of(metrics),
        "reward_first": first,
        "reward_last": last,
    }


def flops_per_second(workers: Sequence[Track], window: Interval) -> dict[str, float]:
    """Pool → FLOPs per second of wall clock, averaged over its workers; pools without counted FLOPs are left out."""
    rates = {}
    for pool, members in by_pool(workers).items():
        spans = [span for track in members for span in track.spans if window[0] <= span["end"] <= window[1]]
        rates[pool] = sum(span.get("flops", 0) for span in spans) / (window[1] - window[0]) / len(members)
    return {pool: rate for pool, rate in rates.items() if rate > 0}


def last_attempt(history: Sequence[Event]) -> tuple[int, Sequence[Event]]:
    """(step of the last rollback, the events after it); (0, all events) if the run never went back."""
    for index in range(len(history) - 1, -1, -1):
        if history[index]["event"] == "rollback":
            return int(history[index]["step"]), history[index + 1 :]
    return 0, history


def process_began(history: Sequence[Event]) -> int:
    """The step from which the last process trained: 0, or that of the rollback by which it resumed the run."""
    # A rollback after the death of a trainer rank, which the same process goes on from, does not count.
    starts = [later for later, event in enumerate(history[1:], start=1) if event["event"] == "inputs"]
    before = history[starts[-1] - 1] if starts else {"event": "none"}
    return int(before["step"]) if before["event"] == "rollback" else 0


def steady_steps(history: Iterable[Event], max_staleness: int) -> tuple[Interval, int] | None:
    """Returns when all pools have work, as (begin, end), and the number of training steps in it; None without any."""
    # These are all steps but the first WARM_UP_STEPS and the last `max_staleness`.
    steps = steps_of(history)
    inner = steps[WARM_UP_STEPS : len(steps) - max_staleness]
    return ((inner[0]["started"], inner[-1]["ended"]), len(inner)) if inner else None


def steady_state(
    config: Config, workers: Sequence[Track], history: Sequence[Event], peak: float | None
) -> dict[str, Any]:
    """The part of the summary that is measured in `steady_steps`; values are None if there are none.

    G is the busy seconds of rollout per step, divided by the number of rollout workers, T the same of trainer ranks.
    """
    rollout, trainer = _pool(workers, "rollout"), _pool(workers, "trainer")
    overlap: dict[str, float | None] = {"seconds": length(intersect(rollout, trainer)), "share": None}
    if (steady := steady_steps(history, config.max_staleness)) is None:
        bound = dict.fromkeys(("generation", "update", "seconds_per_step"))
        return {"overlap": overlap, "bound": bound, "efficiency": None, "flops_per_s": {}, "mfu": {}}
    window, count = steady
    generation = intersect(rollout, [window])
    update = intersect(trainer, [window])
    if (least := min(length(generation), length(update))) > 0:
        overlap["share"] = length(intersect(generation, update)) / least
    seconds = worked(workers, window)
    g, t = (fmean(seconds.get(pool) or [0.0]) / count for pool in ("rollout", "trainer"))
    shortest = placement_of(config).step_seconds(g, t)
    rates = flops_per_second(workers, window)
    return {
        "overlap": overlap,
        "bound": {"generation": g, "update": t, "seconds_per_step": shortest},
        "efficiency": shortest / ((window[1] - window[0]) / count),
        "flops_per_s": rates,
        "mfu": {pool: rate / peak if peak else None for pool, rate in rates.items()},
    }


def memory(metrics: Sequence[Metrics]) -> dict[str, float]:
    """Pool → the most GiB that PyTorch reserved on the GPU of one of its workers; empty without GPUs."""
    peaks: dict[str, float] = {}
    for line in metrics:
        for key, gib in line.items():
            if key.startswith("memory/"):
                pool = key.removeprefix("memory/")
                peaks[pool] = max(float(gib), peaks.get(pool, 0.0))
    return peaks


def staleness(metrics: Sequence[Metrics], updates_per_batch: int = 1) -> dict[str, float]:
    """Age of the images when they were trained on: largest and mean in policy versions, largest in optimizer steps."""
    trained = [line for line in metrics if line.get("staleness/max") is not None]
    largest = max((line["staleness/max"] for line in trained), default=0)
    mean = sum(line["staleness/mean"] for line in trained) / max(1, len(trained))
    # The last optimizer step of a batch trains on samples that are updates_per_batch - 1 further behind.
    behind = max(largest * updates_per_batch + updates_per_batch - 1, 0) if metrics else 0
    return {"staleness_max": largest, "staleness_mean": mean, "staleness_updates_max": behind}


def gradient_kept(metrics: Sequence[Metrics]) -> dict[str, float]:
    # A row is one image in one trained denoising step; rows with advantage 0 are not counted.
    kept, total = (sum((by_age(line, kind) for line in metrics), Counter()) for kind in ("kept", "kept_of"))
    return {str(age): kept[age] / total[age] for age in sorted(total)}


def skipped(metrics: Sequence[Metrics]) -> dict[str, int]:
    """Counts over the whole run: tickets without a score, steps with such or without any, missing optional terms."""
    tickets = [int(line.get("tickets_skipped") or 0) for line in metrics]
    nothing = sum(line.get("reward/mean") is None for line, count in zip(metrics, tickets, strict=True) if count)
    return {
        "tickets": sum(tickets),
        "steps": sum(count > 0 for count in tickets),
        "steps_without_reward": nothing,
        "optional_terms": groups_without(metrics).total(),
    }


def groups_without(metrics: Sequence[Metrics]) -> Counter[str]:
    return sum(map(missing_terms, metrics), Counter())


def warnings_of(metrics: Sequence[Metrics]) -> list[str]:
    counts = skipped(metrics)
    flat = bool(metrics) and all(line.get("zero_std_ratio") == 1.0 for line in metrics)
    warnings = [FLAT.format(steps=len(metrics))] if flat else []
    if counts["tickets"]:
        warnings.append(
            f"{counts['tickets']} tickets in {counts['steps']} steps were skipped, as their rewards could not be had; "
            f"{counts['steps_without_reward']} of these steps trained nothing (see the events `skipped` in "
            "events.jsonl)"
        )
    warnings += [
        f"{count} groups were trained without the term {term}, which is not required and could not be had (see the "
        "events `unscored` in events.jsonl)"
        for term, count in groups_without(metrics).items()
    ]
    return warnings + [
        f"only {share:.0%} of the gradient survived clip and mask for samples {age} versions old; widen "
        "algorithm.clip_range or lower max_staleness"
        for age, share in gradient_kept(metrics).items()
        if share < MIN_GRADIENT_KEPT
    ]


def _pool(workers: Sequence[Track], pool: str) -> list[Interval]:
    return union(interval for track in by_pool(workers).get(pool, []) for interval in track.busy)


def _steady_rate(history: Sequence[Event], images_per_step: float) -> float | None:
    ends = [event["ended"] for event in steps_of(history)]
    if len(ends) <= WARM_UP_STEPS or ends[-1] <= ends[WARM_UP_STEPS - 1]:
        return None
    return (len(ends) - WARM_UP_STEPS) * images_per_step / float(ends[-1] - ends[WARM_UP_STEPS - 1])


def mfu(summary: Mapping[str, Any]) -> str:
    """Text such as "rollout 31.0%, trainer 42.0%": shares of the devices' peak FLOP/s; empty if they are unknown."""
    shares = (summary.get("mfu") or {}).items()
    return ", ".join(f"{pool} {share:.1%}" for pool, share in shares if share is not None)


def configured_pools(config: Config) -> dict[str, tuple[int, float]]:
    """Returns pool → (workers, GPUs of each) as configured; the servers of a term with `serve` are a pool, too."""
    return {
        "rollout": (config.rollout.num_workers, config.rollout.gpus_per_worker),
        "trainer": (config.trainer.num_workers, config.trainer.gpus_per_worker),
        **{pool.name: (pool.workers, pool.gpus_per_worker) for pool in scoring_pools(config)},
        **{server_pool(term): (serve.replicas, serve.gpus) for term, serve in served_terms(config)},
    }


def rollout_size(config: Config, attempt: Sequence[Event]) -> dict[str, int]:
    """Numbers of rollout workers that `joined` and `left` in the last attempt, `fewest` and `most` at the same time."""
    # A newcomer that was turned away is not counted.
    changes = [event for event in attempt if event["event"] in CHANGES]
    if changes:
        first = changes[0]["workers"] + (1 if changes[0]["event"] == "worker_left" else -1)
    else:
        first = places(event for event in attempt if not event.get("newcomer")) or config.rollout.num_workers
    counts = [first, *(event["workers"] for event in changes)]
    return {
        "joined": sum(event["event"] == "worker_joined" for event in changes),
        "left": sum(event["event"] == "worker_left" for event in changes),
        "fewest": min(counts),
        "most": max(counts),
    }


def places(attempt: Iterable[Event]) -> int:
    workers = {place_of(event["worker"]) for event in attempt if event["event"] == "worker"}
    return sum(pool_of(place) == "rollout" for place in workers)


def summarise_evaluations(config: Config, history: Sequence[Evaluation]) -> dict[str, Any]:
    policy = policy_versions(history)
    baseline = next((e for e in history if e.baseline), None)
    warns = config.evaluate.on_hacking != "ignore"
    return {
        "evaluations": {
            "first": _row(policy[0], history) if policy else None,
            "last": _row(policy[-1], history) if policy else None,
            "baseline": _row(baseline, history) if baseline else None,
            "best": best_row(config, history),
        },
        "hacking": {
            "alarms": [alarm.sentence for alarm in alarms(history)] if warns else [],
            "notices": [notice.sentence for notice in notices(history)],
        },
    }


def best_row(config: Config, history: Sequence[Evaluation]) -> dict[str, Any] | None:
    """`curve`, `version` and `mean` of the best version; None if no best version is kept or none was evaluated."""
    if (curve := best_curve(config)) is None or (evaluation := best(history, curve)) is None:
        return None
    return {"curve": curve, "version": evaluation.version, "mean": evaluation.curves[curve].estimate.mean}


def _row(evaluation: Evaluation, history: Sequence[Evaluation]) -> dict[str, Any]:
    curves = {}
    for name, curve in evaluation.curves.items():
        moved = since_first(name, evaluation, history)
        paired = dict.fromkeys(CHANGE_FIELDS) if moved is None else moved.fields()
        curves[name] = {"kind": curve.kind, **asdict(curve.estimate), **paired}
    return {"version": evaluation.version, "steps": evaluation.steps, "guidance": evaluation.guidance, "curves": curves}
