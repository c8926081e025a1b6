"""Pictures and Markdown table of the results of compare.py."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import matplotlib as mpl

from examples.glyphs.learning_curves import smooth
from examples.glyphs.run_result import Result, goal_ratios, interval, score_differences, time_ratios, welch

GOAL = 0.8
"""OCR score on held-out words (not trained on) until which images and seconds are counted."""
FINAL = ("ocr", "other_reader", "wrong_word", "templates", "sharpness", "variety", "contrast")
"""Keys of `Result.final` that the table shows."""
COLOURS = {
    "one_step_off": "#1f5fa8",
    "sync": "#7a7a7a",
    "sync_all_cores": "#2f9e6e",
    "fully_async": "#d9822b",
    "two_updates": "#6a51a3",
    "permuted": "#b03060",
    "fast": "#c23b22",
    "full": "#6a51a3",
    "full_permuted": "#b03060",
    "int8": "#2f9e6e",
    "nf4": "#d9822b",
    "vivid": "#2f9e6e",
    "direct_align": "#d9822b",
}
"""Variant to its colour, in the order of the table."""
FRONTIER = ("variety", "ocr", "contrast")
"""Keys of `Result.final` that pull against each other, in the order of the frontier's axes and colour."""
BEFORE = (0.193, 0.416, 0.378)
"""These three of the model before training (audit.py, 1,024 images)."""
FLOW_GRPO = "grpo"
"""First word of the variants trained with Flow-GRPO; they have a picture and a table of their own."""
FAST, FULL, AGAINST = "fast", "full", "one_step_off"
"""Recipe meant to reach the goal sooner; first word of those with whole weights; recipe both are compared with."""

QUANTIZED = ("int8", "nf4")
"""Variants whose base is stored in 8 and 4 bits; they and AGAINST have other seeds."""
LOOKS = ("vivid", "direct_align")
"""Variants that keep variety and contrast; they and AGAINST have other seeds."""


def draw(results: Sequence[Result], out: Path) -> None:
    """Draws OCR scores against images and seconds: lines are training images, dots held-out words.

    Each variant has a colour. There is a panel of seconds only if several variants have `timed` runs.
    """
    mpl.use("Agg")
    from matplotlib import pyplot

    axes = ("images", "seconds") if len({result.variant for result in results if result.timed}) > 1 else ("images",)
    figure, grid = pyplot.subplots(1, len(axes), figsize=(10, 4), sharey=True, squeeze=False)
    panels = grid[0]
    for panel, axis in zip(panels, axes, strict=True):
        labelled: set[str] = set()
        for result in (r for r in results if axis == "images" or r.timed):
            along, colour = getattr(result, axis), COLOURS.get(result.variant.removeprefix(f"{FLOW_GRPO}_"), "black")
            label = None if result.variant in labelled else result.variant
            labelled.add(result.variant)
            panel.plot(along, smooth(result.reward), color=colour, label=label, linewidth=0.8, alpha=0.6)
            places = [0.0 if step < 0 else along[step] for step, _ in result.evaluations]
            panel.plot(places, [score for _, score in result.evaluations], "o-", color=colour, markersize=3)
        panel.axhline(GOAL, color="black", linewidth=0.6, linestyle=":")
        panel.set(xlabel=axis, ylim=(0, 1))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("OCR score")
    panels[0].legend(fontsize=8, loc="center right")
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def draw_frontier(results: Sequence[Result], out: Path) -> None:
    """Draws one dot per run that has all keys of `FRONTIER`: variety along, OCR up, contrast as colour."""
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    dots = {"before training": [BEFORE]}
    for result in results:
        if set(FRONTIER) <= set(result.final):
            name = "flow_grpo" if result.variant.startswith(FLOW_GRPO) else result.variant
            dots.setdefault(name, []).append(tuple(result.final[key] for key in FRONTIER))
    for marker, (name, found) in zip("poDs^v*X<>Ph8dH"[: len(dots)], dots.items(), strict=True):
        variety, ocr, contrast = zip(*found, strict=True)
        shown = axes.scatter(variety, ocr, c=contrast, cmap="viridis", vmin=0.2, vmax=0.6, marker=marker, label=name)
    figure.colorbar(shown, label="contrast")
    axes.set(xlabel="variety", ylabel="OCR score of held-out words")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower left")
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def table(results: Sequence[Result]) -> str:
    """Returns Markdown: one line per run, each variant compared with sync, and fast compared with one_step_off."""
    lines = [
        "| variant | seed | images | before | OCR | other reader | wrong word | letters by template | sharpness | "
        "variety | contrast | seconds (load) |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for variant in [*COLOURS, *sorted({r.variant for r in results} - set(COLOURS))]:
        lines += [_line(result) for result in results if result.variant == variant]
    others = [name for name in COLOURS if name not in ("sync", "permuted", "full_permuted", FAST, FULL)]
    others += [f"{FLOW_GRPO}_{name}" for name in others]
    compared = [_against_sync(results, name) for name in others]
    return "\n".join([*lines, *filter(None, [*compared, _fast(results), _full(results), _unpaired(results)])])


def _against_sync(results: Sequence[Result], variant: str) -> str:
    """Returns score differences and time ratios, paired by seed; empty without pairs."""
    sync = f"{FLOW_GRPO}_sync" if variant.startswith(FLOW_GRPO) else "sync"
    differences = score_differences(results, variant, sync)
    if not differences:
        return ""
    bounds = interval(differences)
    inside = "" if bounds is None else f"; 90 % interval of the mean {bounds[0]:+.3f} to {bounds[1]:+.3f}"
    scores = f"OCR of {variant} less that of {sync}, by seed: " + ", ".join(f"{d:+.3f}" for d in differences) + inside
    ratios = time_ratios(results, variant, sync)
    if not ratios:
        return f"\n{scores}"
    lines = [scores, f"Seconds of {variant} ÷ {sync}, by seed: {_listed(ratios)}"]
    if reached := goal_ratios(results, variant, sync, GOAL):
        lines.append(f"The same until the first evaluation of {GOAL:g} or more: {_listed(reached)}")
    return "\n" + "\n\n".join(lines)


def _fast(results: Sequence[Result]) -> str:
    """Returns score differences and time ratios of the fast recipe, paired by seed; its scores should not be lower."""
    lines = []
    for key in ("ocr", "other_reader", "variety", "contrast"):
        if differences := score_differences(results, FAST, AGAINST, key=key):
            shown = ", ".join(f"{each:+.3f}" for each in differences)
            lines.append(f"{key} of {FAST} less that of {AGAINST}, by seed: {shown}")
    if ratios := time_ratios(results, FAST, AGAINST):
        lines.append(f"Seconds of {FAST} ÷ {AGAINST}, by seed: {_listed(ratios)}")
    if reached := goal_ratios(results, FAST, AGAINST, GOAL):
        lines.append(f"The same until the first evaluation of {GOAL:g} or more: {_listed(reached)}")
    return "\n" + "\n\n".join(lines) if lines else ""


def _full(results: Sequence[Result]) -> str:
    """Returns score differences of whole weights and the LoRA, paired by seed; empty without pairs."""
    lines = [
        f"{key} of {FULL} less that of {AGAINST}, by seed: " + ", ".join(f"{each:+.3f}" for each in differences)
        for key in ("ocr", "other_reader")
        if (differences := score_differences(results, FULL, AGAINST, key=key))
    ]
    return "\n" + "\n\n".join(lines) if lines else ""


def _unpaired(results: Sequence[Result]) -> str:
    """Returns differences of means and their intervals, of QUANTIZED and LOOKS less AGAINST."""
    lines = []
    for variant in (*QUANTIZED, *LOOKS):
        ones, others = ([r for r in results if r.variant == name] for name in (variant, AGAINST))
        for key in ("ocr", "other_reader", "variety", "contrast"):
            values = [[r.final[key] for r in some if key in r.final] for some in (ones, others)]
            if (bounds := welch(*values)) is not None:
                lines.append(
                    f"{key} of {variant} less that of {AGAINST}, means of {len(values[0])} and {len(values[1])} seeds: "
                    f"{sum(bounds) / 2:+.3f}, 95 % interval {bounds[0]:+.3f} to {bounds[1]:+.3f}"
                )
    return "\n" + "\n\n".join(lines) if lines else ""


def _listed(ratios: Sequence[float]) -> str:
    return ", ".join(f"{ratio:.2f}" for ratio in ratios) + f"; median {median(ratios):.2f}"


def _line(result: Result) -> str:
    final = " | ".join(f"{result.final[key]:.3f}" if key in result.final else "–" for key in FINAL)
    before = f"{result.evaluations[0][1]:.3f}" if result.evaluations[0][0] < 0 else ""
    spent = f"{result.seconds[-1]:.0f} ({result.load:.0f} on {result.cores} cores)" if result.timed else "–"
    return f"| {result.variant} | {result.seed} | {result.images[-1]:.0f} | {before} | {final} | {spent} |"
