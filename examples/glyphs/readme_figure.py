"""The picture of the README and its table of numbers: makes the first, prints the second.

python -m examples.glyphs.readme_figure

It needs three runs of experiment=glyphs_vivid with seed 0 and trains those that are missing: `sync` with one core per
pool, `sync` with both cores in each phase (a fair comparison, because otherwise one core is idle while its pool waits),
and `one_step_off` with one core per pool. Nothing else should run on the machine.
"""

import argparse
import io
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from PIL import Image

from async_flowrl.cli.export_source import read_source, write_lora
from async_flowrl.observability.events import read_events
from async_flowrl.observability.intervals import intersect, union
from async_flowrl.observability.timeline import Track, tracks
from async_flowrl.types import ByteArray
from examples.glyphs.audit import open_model, trained_images
from examples.glyphs.compare import ROOT, Variant, train
from examples.glyphs.learning_curves import Curve, read, smooth
from examples.glyphs.result_picture import COLOURS, GOAL
from examples.glyphs.words import SIDE, TEST

PICTURE = ROOT / "docs" / "images" / "readme.png"
CASES = {
    "sync": "sync, a core per pool",
    "sync_all_cores": "sync, both cores in each phase",
    "one_step_off": "one_step_off, a core per pool",
}
"""Run to its label in the picture and the table."""
RUNS = {
    "sync": Variant("sync", experiment="glyphs_vivid"),
    "sync_all_cores": Variant("sync", ("rollout.threads=2", "trainer.threads=2"), experiment="glyphs_vivid"),
    "one_step_off": Variant("one_step_off", experiment="glyphs_vivid"),
}
WORK = {"rollout": "#2b6cb0", "trainer": "#3b4252"}
WAITING = "#e03131"
WINDOW = 12.0
"""Length in seconds of the part of each timeline that is shown; it lies in the middle of the run."""
SHOWN = 14
"""Number of held-out words (not trained on) in the picture."""
VERSIONS = (0, 30, 60, 240)
"""Numbers of training steps after which the words are shown."""


@dataclass(frozen=True)
class Run:
    """A finished run, read from its directory: summary.json, the curve of metrics.jsonl, and events.jsonl."""

    folder: Path
    summary: dict[str, Any]
    curve: Curve
    events: list[dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("outputs/glyphs_picture"), help="where the runs lie or go")
    parser.add_argument("--out", type=Path, default=PICTURE)
    given = parser.parse_args(arguments)
    runs = {name: run_of(name, given.runs / name) for name in RUNS}
    draw(runs, given.out)
    print(table(runs))
    print(f"wrote {given.out}")


def run_of(name: str, folder: Path) -> Run:
    """Reads the run in `folder`; trains it first if there is no summary.json."""
    if not (folder / "summary.json").exists():
        train(RUNS[name], 0, folder, steps=None)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return Run(folder, summary, read(folder), list(read_events(folder / "events.jsonl")))


def table(runs: dict[str, Run]) -> str:
    """Returns Markdown, one line per run. "s/step" is the median, because some steps wait for an evaluation."""
    lines = ["| run | s/step | images/s | held-out OCR | staleness | digest |", "|---|---|---|---|---|---|"]
    for variant, run in runs.items():
        summary, scores = run.summary, [score for _, score in run.curve.evaluations]
        pace = float(np.median(np.diff(run.curve.seconds)))
        lines.append(
            f"| {CASES[variant]} | {pace:.2f} | {run.curve.images[0] / pace:.0f} | "
            f"{scores[0]:.2f} → {scores[-1]:.2f} | "
            f"{summary['staleness_max']} | {summary['weights_digest'][:12]} |"
        )
    return "\n".join(lines)


def draw(runs: dict[str, Run], out: Path) -> None:
    """Draws the picture into `out`: held-out words above, scores and timelines below."""
    mpl.rcParams.update({"font.size": 8.5, "axes.spines.top": False, "axes.spines.right": False})
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    top, bottom = np.asarray(figure.subfigures(2, 1, height_ratios=[1, 1], hspace=0.02), dtype=object)
    words(top, runs["one_step_off"])
    left, right = np.asarray(bottom.subfigures(1, 2, width_ratios=[1, 1.35]), dtype=object)
    scores(left.add_subplot(), runs)
    shown = ("sync", "one_step_off")
    for axes, variant in zip(np.atleast_1d(right.subplots(2, 1, sharex=True)), shown, strict=True):
        timeline(axes, CASES[variant], runs[variant])
    axes.set_xlabel("seconds (idle and waiting time red)")
    out.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=110, facecolor="white")
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(out, optimize=True)


def words(figure: SubFigure, run: Run) -> None:
    """Draws the same held-out words from the same noises, one row per version, generated with the trained LoRA."""
    grid = figure.subplots(len(VERSIONS), 1)
    for axes, version, row in zip(grid, VERSIONS, progress(run.folder), strict=True):
        axes.imshow(np.concatenate([np.pad(image, ((0, 0), (1, 1), (0, 0)), constant_values=255) for image in row], 1))
        axes.set(xticks=[], yticks=[])
        axes.set_ylabel(f"{version} steps", rotation=0, ha="right", va="center")
        axes.spines[:].set_visible(False)
    grid[0].set_xticks([(SIDE + 2) * (column + 0.5) for column in range(SHOWN)], TEST[:SHOWN])
    grid[0].tick_params(length=0, labeltop=True, labelbottom=False)
    figure.suptitle("asked for words that training has not seen", fontsize=8.5)


def progress(run: Path) -> list[ByteArray]:
    """Returns one array per version: images uint8 [SHOWN, H, W, 3] made with the LoRA of that version's checkpoint."""
    pipeline, found = open_model(), []
    with tempfile.TemporaryDirectory() as folder:
        for version in VERSIONS:
            lora = Path(folder) / str(version)
            write_lora(read_source(run / "checkpoints" / f"step_{version}"), lora)
            found.append(trained_images(pipeline, lora, 1)[:SHOWN, 0])
    return found


def scores(axes: Axes, runs: dict[str, Run]) -> None:
    """Draws the OCR scores of all runs against seconds: lines are training words, dots held-out words."""
    for variant, run in runs.items():
        curve, colour = run.curve, COLOURS[variant]
        places = [0.0 if step < 0 else curve.seconds[step] for step, _ in curve.evaluations]
        held_out = [score for _, score in curve.evaluations]
        axes.plot(places, held_out, "o-", color=colour, markersize=3, linewidth=1.3, label=CASES[variant])
        axes.plot(curve.seconds, smooth(curve.reward), color=colour, linewidth=0.7)
    axes.axhline(GOAL, color="black", linewidth=0.6, linestyle=":")
    axes.set(xlabel="seconds", ylabel="OCR score", ylim=(0, 1), title="training words, and held-out ones (dots)")
    axes.legend(frameon=False, loc="lower right")


def timeline(axes: Axes, title: str, run: Run) -> None:
    """Draws `WINDOW` seconds of rollout and trainer from the middle of the run."""
    steps = [event for event in run.events if event["event"] == "step"]
    start = steps[len(steps) // 2 + 3]["started"]
    rows = [track for track in tracks(run.events) if track.place in ("rollout-0", "trainer-0")]
    for row, track in enumerate(rows):
        axes.broken_barh(bars(track, start, waiting=True), (row - 0.38, 0.76), facecolor=WAITING)
        axes.broken_barh(bars(track, start, waiting=False), (row - 0.38, 0.76), facecolor=WORK[track.place[:-2]])
    axes.set_yticks(range(len(rows)), [track.place[:-2] for track in rows])
    axes.set(xlim=(0, WINDOW), title=title)
    axes.invert_yaxis()


def bars(track: Track, start: float, *, waiting: bool) -> list[tuple[float, float]]:
    """Returns (start, width) in seconds of the waiting or busy intervals inside the window that begins at `start`."""
    found = union(each for times in track.waits.values() for each in times) if waiting else track.busy
    return [(low - start, high - low) for low, high in intersect(found, [(start, start + WINDOW)])]


if __name__ == "__main__":
    main()
