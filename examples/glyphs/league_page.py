"""Tables and picture of the league (examples/glyphs/league.py); a missing run is shown as missing."""

from collections.abc import Sequence
from math import inf
from pathlib import Path
from statistics import fmean, median

import matplotlib as mpl

from examples.glyphs.league_results import League, tuned_score
from examples.glyphs.run_result import Result

GOALS = (0.6, 0.7, 0.8)
"""OCR scores on held-out words (not trained on); the page shows the images and seconds that reach each."""
COLUMNS = {
    "ocr": "OCR",
    "other_reader": "other reader",
    "wrong_word": "wrong word",
    "templates": "letters by template",
    "variety": "variety",
    "contrast": "contrast",
    "sharpness": "sharpness",
}
"""Key of `Result.final` to column heading."""
SEEDS_EACH = 3
"""Number of seeds with which every algorithm is judged."""
NOT_RUN = "not run"
NOTHING = (
    "**No judged run of the league has been made yet**, so this page has no scores, no picture and no order of the\n"
    "algorithms. The first command above makes the runs, and puts the tables and the picture here."
)
CAPTION = "Held-out words; thin lines are seeds, thick ones their means"


def page(league: League, picture: str) -> str:
    """Returns Markdown: final scores, the picture at path `picture`, images and seconds to each goal, and the tuning.

    Without a judged run (a run with the tuned learning rate) it returns `NOTHING`, and the tuning if there is any.
    """
    tuning = ["### Tuning", tuning_table(league)]
    if not any(league.judged.values()):
        return "\n\n".join([NOTHING, *(tuning if any(league.tuning.values()) else [])])
    scores = ["### Scores at the end", scores_table(league), f"![{CAPTION}]({picture})"]
    return "\n\n".join([*missing(league), *scores, "### Images and seconds to a score", goals_table(league), *tuning])


def missing(league: League) -> list[str]:
    """Returns a paragraph about the algorithms that are not judged with SEEDS_EACH seeds; empty if all are."""
    left = [name for name in league.algorithms if len(league.judged[name]) < SEEDS_EACH]
    if not left:
        return []
    names = ", ".join(f"`{name}`" for name in left)
    return [f"**The league is not finished.** Not yet judged with {SEEDS_EACH} seeds: {names}."]


def ranked(league: League) -> list[str]:
    """Algorithms by mean final OCR score, best first; those without a judged run last, in their configured order."""
    judged = league.judged
    return sorted(league.algorithms, key=lambda name: -mean_of(judged[name], "ocr") if judged[name] else inf)


def mean_of(results: Sequence[Result], key: str) -> float:
    return fmean(result.final[key] for result in results)


def scores_table(league: League) -> str:
    """One line per algorithm: means over its judged seeds, the final OCR of each seed, and the lowest evaluation."""
    head = ["algorithm", "learning rate", "seeds", *COLUMNS.values(), "OCR, by seed", "lowest evaluation"]
    base = [f"{league.reference[key]:.3f}" if key in league.reference else "" for key in COLUMNS]
    rows = [["before training", "", "", *base, "", ""]]
    for name in ranked(league):
        found, rate = league.judged[name], league.chosen(name)
        given = "not tuned" if rate is None else f"{rate:g}"
        if not found:
            rows.append([f"`{name}`", given, NOT_RUN, *[""] * (len(COLUMNS) + 2)])
            continue
        means = [f"{mean_of(found, key):.3f}" for key in COLUMNS]
        ocr = ", ".join(f"{result.final['ocr']:.3f}" for result in found)
        lowest = min(score for result in found for _, score in result.evaluations)
        rows.append([f"`{name}`", given, _seeds(found), *means, ocr, f"{lowest:.3f}"])
    return _table(head, rows)


def goals_table(league: League) -> str:
    """Images of each seed until each goal; seconds for the median of these images, at the measured pace."""
    head = [
        "algorithm",
        *(f"images to {goal:g}" for goal in GOALS),
        "s per step",
        *(f"s to {goal:g}" for goal in GOALS),
    ]
    rows = []
    for name in ranked(league):
        found = league.judged[name]
        if not found:
            rows.append([f"`{name}`", NOT_RUN, *[""] * (len(head) - 2)])
            continue
        reached = [[result.images_to(goal) for result in found] for goal in GOALS]
        images = [", ".join("never" if each is None else f"{each:.0f}" for each in goal) for goal in reached]
        rows.append([f"`{name}`", *images, *_seconds(league, name, reached)])
    return _table(head, rows)


def _seconds(league: League, name: str, reached: Sequence[Sequence[float | None]]) -> list[str]:
    if name not in league.pace:
        return ["not measured", *[""] * len(GOALS)]
    pace = pace_of(league.pace[name])
    middles = [median(inf if each is None else each for each in goal) for goal in reached]
    return [
        f"{pace:.2f}",
        *("never" if each == inf else f"{each / _per_step(league, name) * pace:.0f}" for each in middles),
    ]


def pace_of(result: Result) -> float:
    """Median seconds per training step, without the first two steps, which include loading."""
    steps = [after - before for before, after in zip(result.seconds[1:], result.seconds[2:], strict=False)]
    return median(steps)


def _per_step(league: League, name: str) -> float:
    """Images per training step."""
    return league.judged[name][0].images[0]


def tuning_table(league: League) -> str:
    """One line per algorithm: the tuning score of each learning rate, and the chosen rate."""
    head = ["algorithm", *(f"{rate:g}" for rate in league.rates), "chosen"]
    rows = []
    for name in league.algorithms:
        tuning, rate = league.tuning[name], league.chosen(name)
        scores = [f"{tuned_score(tuning[each]):.3f}" if each in tuning else NOT_RUN for each in league.rates]
        edge = rate in (league.rates[0], league.rates[-1])
        rows.append([f"`{name}`", *scores, "" if rate is None else f"{rate:g}" + (", at the edge" if edge else "")])
    return _table(head, rows)


def _seeds(found: Sequence[Result]) -> str:
    return ", ".join(str(result.seed) for result in found)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def draw(league: League, out: Path) -> None:
    """Draws held-out OCR scores against images and, for algorithms with a known pace, against seconds.

    Thin lines are seeds, the thick line is their mean. At least one judged run is required.
    """
    mpl.use("Agg")
    from matplotlib import pyplot

    shown = [name for name in ranked(league) if league.judged[name]]
    axes = ("images", "seconds") if any(name in league.pace for name in shown) else ("images",)
    figure, grid = pyplot.subplots(1, len(axes), figsize=(5.5 * len(axes) + 1, 4.5), sharey=True, squeeze=False)
    colours = mpl.colormaps["tab20"]
    for panel, axis in zip(grid[0], axes, strict=True):
        for name in (name for name in shown if axis == "images" or name in league.pace):
            colour = colours(2 * league.algorithms.index(name) % 20 + (league.algorithms.index(name) >= 10))
            scale = 1.0 if axis == "images" else pace_of(league.pace[name]) / _per_step(league, name)
            curves = [_curve(result, scale) for result in league.judged[name]]
            for along, scores in curves:
                panel.plot(along, scores, color=colour, linewidth=0.5, alpha=0.6)
            means = [fmean(scores) for scores in zip(*(scores for _, scores in curves), strict=True)]
            panel.plot(curves[0][0], means, "o-", color=colour, linewidth=1.8, markersize=3, label=name)
        panel.set(xlabel=axis, ylim=(0, 1))
        panel.grid(alpha=0.3)
    grid[0][0].set_ylabel("OCR score of held-out words")
    lines, names = grid[0][0].get_legend_handles_labels()  # Of all, those without a known pace, too.
    grid[0][-1].legend(lines, names, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def _curve(result: Result, scale: float) -> tuple[list[float], list[float]]:
    places = [0.0 if step < 0 else scale * result.images[step] for step, _ in result.evaluations]
    return places, [score for _, score in result.evaluations]
