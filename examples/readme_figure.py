"""python examples/readme_figure.py: makes every picture of the README and prints its table of numbers.

Three runs of the demo: `sync` with one core per pool, `sync` with both cores in each phase (the fair opponent: while
one pool waits, its core would otherwise lie idle), and `one_step_off` with one core per pool. With --repeat N they take
turns N times, and the run with the median wall clock of each stands for it. Nothing else should be running.
"""

import argparse
import io
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from PIL import Image

from async_flowrl.generate import apply_lora, open_pipeline, sample, settings_of
from async_flowrl.observability.events import read_events
from async_flowrl.observability.intervals import intersect
from async_flowrl.observability.timeline import Track, tracks

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "readme.png"
COMMON = ("evaluate.before_training=false", "evaluate.images_per_prompt=2", "monitor.progress=false")
BOTH = ("rollout.threads=2", "trainer.threads=2")
CASES = {
    "sync, a core per pool": ("sync", ()),
    "sync, both cores in each phase": ("sync", BOTH),
    "one_step_off, a core per pool": ("one_step_off", ()),
}
COLOURS = dict(zip(CASES, ("#7a7a7a", "#d9822b", "#1f5fa8"), strict=True))
WORK = {"rollout": "#2b6cb0", "trainer": "#3b4252"}
WAITING = "#e03131"
WINDOW = 3.0
"""Seconds of each timeline that are shown, from the middle of the run."""
PROMPTS = ("red red red red", "blue blue blue blue")


@dataclass(frozen=True)
class Run:
    """A finished run directory, read back."""

    folder: Path
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    events: list[dict[str, Any]]

    @property
    def seconds(self) -> list[float]:
        """End of every step, in seconds since the first step began."""
        steps = [event for event in self.events if event["event"] == "step"]
        return [event["ended"] - steps[0]["started"] for event in steps]

    @property
    def training_seconds(self) -> float:
        return self.seconds[-1]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("outputs/readme_figure"), help="where the runs lie or go")
    parser.add_argument("--repeat", type=int, default=1, help="how often each run is made")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=PICTURE)
    given = parser.parse_args(arguments)
    found: dict[str, list[Run]] = {name: [] for name in CASES}
    for turn in range(given.repeat):
        for name in CASES:
            found[name].append(
                train(name, given.runs / f"{name.replace(', ', '-').replace(' ', '_')}-{turn}", given.steps)
            )
    chosen = {name: median_run(runs) for name, runs in found.items()}
    draw(chosen, given.out)
    print(table(found))
    print(f"wrote {given.out}")


def train(name: str, folder: Path, steps: int) -> Run:
    """The run, made unless its directory already holds a finished one."""
    mode, overrides = CASES[name]
    if not (folder / "summary.json").exists():
        command = [sys.executable, "-m", "async_flowrl.main", "--config-name", mode, f"output_dir={folder}"]
        command += [f"total_steps={steps}", "evaluate.every=0", *COMMON, *overrides]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return Run(
        folder,
        json.loads((folder / "summary.json").read_text()),
        [json.loads(line) for line in lines],
        list(read_events(folder / "events.jsonl")),
    )


def median_run(runs: Sequence[Run]) -> Run:
    middle = statistics.median_low(run.training_seconds for run in runs)
    return next(run for run in runs if run.training_seconds == middle)


def table(found: dict[str, list[Run]]) -> str:
    """Markdown: medians over the repeats, and whether the repeats agree bit for bit."""
    lines = ["| run | s/step | images/s | reward, last tenth | staleness | digest |", "|---|---|---|---|---|---|"]
    for name, runs in found.items():
        per_step = statistics.median(run.training_seconds / run.summary["steps"] for run in runs)
        rate = statistics.median(run.summary["steady_images_per_s"] for run in runs)
        digests = {run.summary["weights_digest"][:12] for run in runs}
        first = runs[0].summary
        lines.append(
            f"| {name} | {per_step:.3f} | {rate:.0f} | {first['reward_last']:.3f} | {first['staleness_max']} | "
            f"{', '.join(sorted(digests))} |"
        )
    return "\n".join(lines)


def draw(chosen: dict[str, Run], out: Path) -> None:
    mpl.rcParams.update({"font.size": 8.5, "axes.spines.top": False, "axes.spines.right": False})
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    top, bottom = np.asarray(figure.subfigures(2, 1, height_ratios=[3, 1.9], hspace=0.02), dtype=object)
    left, right = np.asarray(top.subfigures(1, 2, width_ratios=[1, 1.35]), dtype=object)
    reward_curves(left.add_subplot(), chosen)
    shown = ("sync, a core per pool", "one_step_off, a core per pool")
    for axes, name in zip(np.atleast_1d(right.subplots(2, 1, sharex=True)), shown, strict=True):
        timeline(axes, name, chosen[name])
    axes.set_xlabel("seconds (idle and waiting time red)")
    pictures(bottom, chosen[shown[1]])
    out.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, facecolor="white")
    # Enlarged noise hardly compresses; 256 colours are enough for it and for everything else here.
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(out, optimize=True)


def reward_curves(axes: Axes, chosen: dict[str, Run]) -> None:
    for name, run in chosen.items():
        rewards = [line["reward/mean"] for line in run.metrics]
        axes.plot(run.seconds, rewards, label=name, color=COLOURS[name], linewidth=1.3)
    axes.set(
        xlabel="seconds since the first step began",
        ylabel="mean reward of the step",
        title=f"{len(run.metrics)} steps, same prompts and seeds",
    )
    axes.legend(frameon=False, loc="lower right")


def timeline(axes: Axes, title: str, run: Run) -> None:
    """A few seconds of rollout and trainer in the middle of the run."""
    steps = [event for event in run.events if event["event"] == "step"]
    start = steps[len(steps) // 2]["started"]
    rows = [track for track in tracks(run.events) if track.place in ("rollout-0", "trainer-0")]
    for row, track in enumerate(rows):
        axes.broken_barh(bars(track, start, waiting=True), (row - 0.38, 0.76), facecolor=WAITING)
        axes.broken_barh(bars(track, start, waiting=False), (row - 0.38, 0.76), facecolor=WORK[track.place[:-2]])
    axes.set_yticks(range(len(rows)), [track.place[:-2] for track in rows])
    axes.set(xlim=(0, WINDOW), title=title)
    axes.invert_yaxis()


def bars(track: Track, start: float, *, waiting: bool) -> list[tuple[float, float]]:
    """(start, width) of the intervals inside the window."""
    found = track.waiting("wait_data", "wait_weights", "sync", "idle") if waiting else track.busy
    return [(low - start, high - low) for low, high in intersect(found, [(start, start + WINDOW)])]


def pictures(figure: SubFigure, run: Run, count: int = 6) -> None:
    """First and last images of the same seeds, by diffusers' own pipeline with the exported LoRA."""
    settings = settings_of(run.folder / "lora", None)
    pipeline = open_pipeline(settings, "cpu")
    before = [sample(pipeline, settings, prompt, range(count)) for prompt in PROMPTS]
    apply_lora(pipeline, run.folder / "lora")
    after = [sample(pipeline, settings, prompt, range(count)) for prompt in PROMPTS]
    grid = figure.subplots(2, 2)
    for row, prompt in enumerate(PROMPTS):
        for column, (when, images) in enumerate((("before", before), ("after", after))):
            axes = grid[row][column]
            axes.imshow(
                np.concatenate([np.pad(i, ((0, 0), (0, 2), (0, 0)), constant_values=255) for i in images[row]], 1)
            )
            axes.set_title(f"“{prompt}”, {when} {run.summary['steps']} steps")
            axes.axis("off")


if __name__ == "__main__":
    main()
