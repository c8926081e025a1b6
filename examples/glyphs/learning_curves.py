"""Curves of finished runs: their OCR scores, on training images and on held-out words, against images and seconds.

python -m examples.glyphs.learning_curves outputs/seed0 outputs/seed1 --out docs/images/glyphs_curves.png

Held-out words are words that no training has seen. compare.py and readme_figure.py also read runs with `read`.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import matplotlib as mpl

WINDOW = 10
"""Training steps over which the training curve is averaged."""


@dataclass(frozen=True)
class Curve:
    """The course of one run: `images`, `seconds` and `reward` have one entry per training step."""

    name: str
    images: list[float]
    """Images trained on, summed up to the step."""
    seconds: list[float]
    """Seconds, summed up to the step."""
    reward: list[float]
    """Mean reward of the step's images."""
    evaluations: list[tuple[int, float]]
    """(step, mean OCR score of the held-out words after that step); step -1 means before training."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="run directories; each is drawn under its folder's name")
    parser.add_argument("--out", type=Path, default=Path("docs/images/glyphs_curves.png"))
    arguments = parser.parse_args()
    curves = [read(run) for run in arguments.runs]
    for curve in curves:
        held_out = ", ".join(f"{score:.3f}" for _, score in curve.evaluations)
        print(f"{curve.name}: {curve.images[-1]:.0f} images, {curve.seconds[-1]:.0f} s; held-out {held_out}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    plot(curves, arguments.out)


def read(run: Path) -> Curve:
    """Reads the curve from metrics.jsonl of a run directory. Raises FileNotFoundError if there is none."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = any("evaluation/ocr/mean" in row for row in rows)
    key = "evaluation{}/ocr/mean" if trained else "evaluation{}/held_out/ocr/mean"
    evaluations = [(-1, rows[0][key.format("_before")])] if key.format("_before") in rows[0] else []
    evaluations += [(i, r[key.format("")]) for i, r in enumerate(rows) if r.get(key.format("")) is not None]
    return Curve(
        run.name,
        list(accumulate(r["images"] for r in rows)),
        list(accumulate(r["timing/step"] for r in rows)),
        [r.get("reward/ocr/mean", r["reward/mean"]) for r in rows],
        evaluations,
    )


def smooth(values: Sequence[float]) -> list[float]:
    """Replaces each value by the mean of the `WINDOW` values that end with it (fewer at the start)."""
    heads = [values[max(0, i - WINDOW + 1) : i + 1] for i in range(len(values))]
    return [sum(head) / len(head) for head in heads]


def plot(curves: Sequence[Curve], out: Path) -> None:
    """Draws two panels (against images, against seconds) with one line per run; dots are held-out evaluations."""
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for panel, axis in zip(panels, ("images", "seconds"), strict=True):
        for number, curve in enumerate(curves):
            along, colour = getattr(curve, axis), f"C{number % 10}"
            panel.plot(along, smooth(curve.reward), color=colour, label=curve.name, linewidth=1)
            places = [0.0 if step < 0 else along[step] for step, _ in curve.evaluations]
            panel.plot(places, [score for _, score in curve.evaluations], "o", color=colour, markersize=4)
        panel.set(xlabel=axis, ylim=(0, 1))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("OCR score")
    panels[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
