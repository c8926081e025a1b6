"""Curves of finished runs: the OCR score of training images and of held-out words, against images and seconds.

python -m examples.glyphs.curves outputs/seed0 outputs/seed1 --out docs/images/glyphs_curves.png
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import matplotlib as mpl

WINDOW = 10
"""Steps over which the training curve is averaged."""


@dataclass(frozen=True)
class Curve:
    """Per step: images so far, seconds so far, mean reward. `evaluations`: (step, -1 is before the first; score)."""

    name: str
    images: list[float]
    seconds: list[float]
    reward: list[float]
    evaluations: list[tuple[int, float]]


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
    """The curve of one run directory's metrics.jsonl."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    key = "evaluation{}/ocr/mean"
    evaluations = [(-1, rows[0][key.format("_before")])] if key.format("_before") in rows[0] else []
    evaluations += [(i, r[key.format("")]) for i, r in enumerate(rows) if r.get(key.format("")) is not None]
    return Curve(
        run.name,
        list(accumulate(r["images"] for r in rows)),
        list(accumulate(r["timing/step"] for r in rows)),
        [r["reward/mean"] for r in rows],
        evaluations,
    )


def smooth(values: Sequence[float]) -> list[float]:
    """Mean over the last `WINDOW` values, fewer at the start."""
    heads = [values[max(0, i - WINDOW + 1) : i + 1] for i in range(len(values))]
    return [sum(head) / len(head) for head in heads]


def plot(curves: Sequence[Curve], out: Path) -> None:
    """Two panels, one line per run; dots are evaluations on held-out words."""
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
