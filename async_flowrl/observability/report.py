"""report.html: one self-contained page about a run. Imports nothing that the run's configuration names."""

import argparse
import base64
import json
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from async_flowrl.observability.charts import Line, legend, line_chart, timeline
from async_flowrl.observability.evaluation_summary import evaluation_parts
from async_flowrl.observability.evaluations import read_evaluations
from async_flowrl.observability.events import Event, effective, read_events
from async_flowrl.observability.intervals import Interval, intersect, length
from async_flowrl.observability.ledger import STATES, pool_of
from async_flowrl.observability.metrics import Metrics
from async_flowrl.observability.reward_bound import reward_bound
from async_flowrl.observability.timeline import Track, tracks

MAX_STEPS_SHOWN = 8
"""Steps in the close-up of the timeline."""
MAX_PICTURES = 6
STYLE = """
body {font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2em auto; padding: 0 1em; color: #222}
h1 {font-size: 1.5em} h2 {font-size: 1.1em; margin-top: 2em}
.charts {display: flex; flex-wrap: wrap; gap: 1em} figure {margin: 0 0 1em} figcaption {color: #555; font-size: .9em}
table {border-collapse: collapse} td, th {padding: .15em .8em .15em 0; text-align: left}
.lead {font-size: 1.1em; background: #f3f5f8; padding: .6em .9em; border-radius: 6px}
.key {margin-right: 1em} .key i {display: inline-block; width: .9em; height: .9em; margin-right: .3em}
pre {background: #f6f6f6; padding: 1em; overflow: auto; font-size: .85em} svg, img {max-width: 100%; height: auto}
"""
SUMMARY_KEYS = (
    "mode",
    "max_staleness",
    "staleness_mean",
    "wall_seconds",
    "images",
    "images_per_s",
    "steady_images_per_s",
    "efficiency",
    "reward_first",
    "reward_last",
    "evaluation_prompts",
    "weights_digest",
)
EVALUATED = {"held_out": "evaluation of held-out prompts", "training": "evaluation of training prompts"}
"""How the curve of evaluations is called."""
MIN_LOST_SHARE = 0.1
"""Shares of its time below this that a pool loses are not mentioned."""
MAX_SPLIT_SHARE = 0.97
"""Another split of the devices is mentioned if steps would take at most this share of their time."""


def write_report(run_dir: Path) -> Path:
    """Writes report.html from metrics.jsonl, events.jsonl, config.yaml, images/ and, if there, summary.json."""
    metrics: list[Metrics] = _lines(run_dir / "metrics.jsonl")
    history = effective(_lines(run_dir / "events.jsonl"))
    summary = _json(run_dir / "summary.json")
    workers = tracks(history)
    parts = [
        f"<h1>{escape(run_dir.name)}</h1>",
        f'<p class="lead">{escape(verdict(run_dir, workers, history))}</p>',
        _facts(summary, metrics),
        *_curves(metrics, history, EVALUATED.get(str(summary.get("evaluation_prompts")), "evaluation prompts")),
        *_evaluations(run_dir),
        *_timelines(workers, history),
        *_pictures(run_dir / "images"),
        "<h2>Configuration</h2>",
        f"<pre>{escape(_text(run_dir / 'config.yaml'))}</pre>",
    ]
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(run_dir.name)}</title>'
        f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )
    path = run_dir / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _evaluations(run_dir: Path) -> list[str]:
    settings: Any = OmegaConf.create(_text(run_dir / "config.yaml") or "{}")
    on_hacking = OmegaConf.select(settings, "evaluate.on_hacking", default="warn")
    return evaluation_parts(read_evaluations(run_dir / "evaluations.jsonl"), str(on_hacking))


def verdict(run_dir: Path, workers: Sequence[Track], history: Sequence[Event]) -> str:
    """The bottleneck of a run, from its events and the shape of its step."""
    window, settings = _window(history), _text(run_dir / "config.yaml")
    if (sentence := reward_bound(workers, window)) is not None:
        return sentence
    config: Any = OmegaConf.create(settings) if settings else {}
    separate = config.get("placement") == "separate"
    split = better_split(workers, window) if separate else None
    return bottleneck(_step_pools(workers, window), split)


def bottleneck(pools: Mapping[str, Mapping[str, float]], split: str | None = None) -> str:
    """One sentence from the pools' seconds per state: what to change to make the run shorter.

    `split` (see better_split) is tried first where one of the pools is too small.
    """
    share = {
        (pool, state): value / sum(seconds.values())
        for pool, seconds in pools.items()
        for state, value in seconds.items()
        if sum(seconds.values()) > 0
    }
    waited, held_up = share.get(("trainer", "wait_data"), 0.0), share.get(("trainer", "sync"), 0.0)
    starved, late = share.get(("rollout", "idle"), 0.0), share.get(("rollout", "wait_weights"), 0.0)
    if ("trainer", "busy") not in share or ("rollout", "busy") not in share:
        return "Too little was recorded to name a bottleneck."
    if max(waited, held_up, starved, late) < MIN_LOST_SHARE:
        return "The pools are balanced: neither side loses a tenth of its time waiting for the other."
    if held_up > max(waited, starved, late):
        return f"Publishing weights is the bottleneck: it held the trainer up {held_up:.0%} of the time."
    if late > max(waited, starved):
        return (
            f"Delivering weights is the bottleneck: rollout workers waited for new weights {late:.0%} of the time; a "
            "faster transport or a larger max_staleness shortens the run."
        )
    if min(waited, starved) >= MIN_LOST_SHARE:
        return (
            f"The pools take turns: the trainer waited for images {waited:.0%} of the time and rollout workers had "
            f"nothing to do {starved:.0%} of it; a larger max_staleness lets them work side by side."
        )
    instead = f"try {split} devices" if split else None
    if waited > starved:
        return (
            f"Rollout-bound: the trainer waited for images {waited:.0%} of the time; "
            f"{instead or 'more rollout workers or fewer denoising steps shorten the run'}."
        )
    advice = "more trainer ranks shorten the run, and fewer rollout workers do not lengthen it"
    return f"Training-bound: rollout workers had nothing to do {starved:.0%} of the time; {instead or advice}."


def better_split(workers: Sequence[Track], window: Interval) -> str | None:
    """ "5:3" if so many rollout and trainer devices would do the same work in less time than the ones there were.

    Work is what each pool was busy with; colocated pools have nothing to split.
    """
    work, devices = {"rollout": 0.0, "trainer": 0.0}, {"rollout": 0, "trainer": 0}
    for track in workers:
        if (pool := pool_of(track.place)) in work:
            work[pool] += length(intersect(track.busy, [window]))
            devices[pool] += 1
    total = sum(devices.values())

    def seconds(rollout: int) -> float:
        return max(work["rollout"] / rollout, work["trainer"] / (total - rollout))

    if min(devices.values()) == 0:
        return None
    best = min(range(1, total), key=seconds)
    return f"{best}:{total - best}" if seconds(best) < MAX_SPLIT_SHARE * seconds(devices["rollout"]) else None


def _step_pools(workers: Sequence[Track], window: Interval) -> dict[str, dict[str, float]]:
    """Seconds per pool and state inside the window, from the events; start-up and the end do not count."""
    pools: dict[str, dict[str, float]] = {}
    for track in workers:
        seconds = pools.setdefault(pool_of(track.place), dict.fromkeys(STATES, 0.0))
        for state in STATES:
            intervals = track.busy if state == "busy" else track.waiting(state)
            seconds[state] += length(intersect(intervals, [window]))
    return pools


def _window(history: Sequence[Event]) -> Interval:
    steps = [event for event in history if event["event"] == "step"]
    if steps:
        return min(event["started"] for event in steps), max(event["ended"] for event in steps)
    times = [event["time"] for event in history] or [0.0, 1.0]
    return min(times), max(times)


def _facts(summary: dict[str, Any], metrics: Sequence[Metrics]) -> str:
    rows: list[tuple[str, Any]] = [("steps", len(metrics))]
    rows += [(key.replace("_", " "), summary[key]) for key in SUMMARY_KEYS if summary.get(key) is not None]
    if (summary.get("overlap") or {}).get("share") is not None:
        rows.append(("overlap, share of min(G, T)", summary["overlap"]["share"]))
    rows += [("MFU", shares)] if (shares := mfu(summary)) else []
    rows += [("plan", summary["plan"]["sentence"])] if summary.get("plan") else []
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(_number(value))}</td></tr>" for name, value in rows)
    pools = summary.get("pools") or {}
    return f"<table>{cells}</table>{_pool_table(pools) if pools else ''}"


def mfu(summary: Mapping[str, Any]) -> str:
    """Model FLOPs utilisation per pool in words; empty where the device's peak is not known."""
    known = {pool: value for pool, value in (summary.get("mfu") or {}).items() if value is not None}
    return ", ".join(f"{pool} {value:.1%}" for pool, value in known.items())


def _pool_table(pools: dict[str, dict[str, float]]) -> str:
    states = list(next(iter(pools.values())))
    head = "".join(f"<th>{escape(state.replace('_', ' '))}</th>" for state in states)
    rows = "".join(
        f"<tr><th>{escape(pool)}</th>" + "".join(f"<td>{seconds[state]:.1f} s</td>" for state in states) + "</tr>"
        for pool, seconds in pools.items()
    )
    return f"<h2>Where the time went</h2><table><tr><th></th>{head}</tr>{rows}</table>"


def _curves(metrics: Sequence[Metrics], history: Sequence[Event], evaluation: str) -> list[str]:
    steps = [line["step"] for line in metrics]
    clock = _wall_clock(metrics, history)
    reward = [line.get("reward/mean") for line in metrics]
    evaluated = [line for line in metrics if line.get("evaluation/reward/mean") is not None]
    curve = Line(evaluation, [e["step"] for e in evaluated], [e["evaluation/reward/mean"] for e in evaluated])
    by_step = [Line("training", steps, reward), *([curve] if evaluated else [])]
    ages = [Line(kind, steps, [line.get(f"staleness/{kind}") for line in metrics]) for kind in ("mean", "max")]
    names = sorted({name for line in metrics for name in line if name.startswith("timing/")})
    timing = [Line(name.removeprefix("timing/"), steps, [line.get(name) for line in metrics]) for name in names]
    charts = (
        ("Reward against steps", line_chart(by_step, x_label="step", y_label="reward")),
        ("Reward against wall clock", line_chart([Line("", clock, reward)], x_label="seconds", y_label="reward")),
        ("Staleness at the trainer's door", line_chart(ages, x_label="step", y_label="versions")),
        ("Timing", line_chart(timing, x_label="step", y_label="seconds")),
    )
    figures = (f"<figure>{chart}<figcaption>{title}</figcaption></figure>" for title, chart in charts)
    return ["<h2>Curves</h2>", f'<div class="charts">{"".join(figures)}</div>']


def _wall_clock(metrics: Sequence[Metrics], history: Sequence[Event]) -> list[float]:
    """Seconds from the start of the first step to the end of each one."""
    steps = {event["step"]: event for event in history if event["event"] == "step"}
    if steps and all(line["step"] in steps for line in metrics):
        start = min(event["started"] for event in steps.values())
        return [steps[line["step"]]["ended"] - start for line in metrics]
    total, ends = 0.0, []
    for line in metrics:
        total += line.get("timing/step") or 0.0
        ends.append(total)
    return ends


def _timelines(workers: Sequence[Track], history: Sequence[Event]) -> list[str]:
    if not workers:
        return []
    start, end = _window(history)
    steps = sorted((event for event in history if event["event"] == "step"), key=lambda event: int(event["step"]))
    middle = steps[len(steps) // 2 : len(steps) // 2 + MAX_STEPS_SHOWN]
    parts = ["<h2>Timeline</h2>", legend()]
    if middle:
        close = middle[0]["started"], middle[-1]["ended"]
        title = f"Steps {middle[0]['step']} to {middle[-1]['step']}"
        parts.append(f"<figure>{timeline(workers, close, start)}<figcaption>{title}</figcaption></figure>")
    parts.append(f"<figure>{timeline(workers, (start, end), start)}<figcaption>The whole run</figcaption></figure>")
    return parts


def _pictures(folder: Path) -> list[str]:
    paths = sorted(folder.glob("*.png")) if folder.is_dir() else []
    if not paths:
        return []
    count = min(MAX_PICTURES, len(paths))
    last = len(paths) - 1
    chosen = sorted({round(index * last / max(1, count - 1)) for index in range(count)})
    parts = ["<h2>Images</h2>"]
    for path in (paths[index] for index in chosen):
        data = base64.b64encode(path.read_bytes()).decode()
        caption = f"<figcaption>{escape(path.stem)}</figcaption>"
        parts.append(f'<figure><img src="data:image/png;base64,{data}" alt="{escape(path.stem)}">{caption}</figure>')
    return parts


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _lines(path: Path) -> list[dict[str, Any]]:
    return list(read_events(path)) if path.exists() else []


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes report.html into a run directory")
    parser.add_argument("run", type=Path, help="run directory")
    run = parser.parse_args().run
    if not (run / "metrics.jsonl").exists():
        parser.error(f"{run} is no run directory: it has no metrics.jsonl")
    sys.stdout.write(f"{write_report(run)}\n")


if __name__ == "__main__":
    main()
