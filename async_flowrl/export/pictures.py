"""Pictures for a model card: the reward curve of a run, and the images of its first and an exported version."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from async_flowrl.observability.evaluations import Evaluation
from async_flowrl.observability.metrics import Metrics

CURVE, GRID = "curve.png", "before_after.png"
_GAP = 16
"""Pixels between the two images."""


def write_curve(path: Path, metrics: Sequence[Metrics], evaluations: Sequence[Evaluation]) -> Path | None:
    """Draws the training reward by step, and the evaluations with their 95 % intervals.

    Returns `path`, or None, without a file, if there is neither.
    """
    from matplotlib.figure import Figure

    trained = [(line["step"], line["reward/mean"]) for line in metrics if line.get("reward/mean") is not None]
    policy = sorted((each for each in evaluations if not each.baseline), key=lambda each: each.version)
    scored = [(each.version, each.curves["reward"].estimate()) for each in policy if "reward" in each.curves]
    if not trained and not scored:
        return None
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot()
    if trained:
        axes.plot(*zip(*trained, strict=True), color="#8aa9cf", linewidth=1, label="training images")
    if scored:
        steps, means = [step for step, _ in scored], [mean.mean for _, mean in scored]
        axes.plot(steps, means, color="#d9822b", marker="o", label="evaluations, with 95 % intervals")
        bounds = [(f.mean, f.mean) if f.low is None or f.high is None else (f.low, f.high) for _, f in scored]
        low, high = zip(*bounds, strict=True)
        axes.fill_between(steps, low, high, color="#d9822b", alpha=0.2, linewidth=0)
    axes.set_xlabel("training step")
    axes.set_ylabel("reward")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    return path


def write_grid(path: Path, images: Path, *, last: int) -> Path | None:
    """Puts the pictures that a run drew of version 0 and of version `last` side by side.

    Returns `path`, or None, without a file, if one of the two is missing or `last` is 0.
    """
    before, after = (images / f"step_{version:06d}.png" for version in (0, last))
    if last == 0 or not before.is_file() or not after.is_file():
        return None
    with Image.open(before) as left, Image.open(after) as right:
        sheet = Image.new("RGB", (left.width + _GAP + right.width, max(left.height, right.height)), "white")
        sheet.paste(left.convert("RGB"), (0, 0))
        sheet.paste(right.convert("RGB"), (left.width + _GAP, 0))
    sheet.save(path, format="PNG", optimize=True)
    return path
