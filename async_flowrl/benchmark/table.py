"""Output of the benchmark: JSON and back, Markdown tables, and a picture."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from async_flowrl.benchmark.loops import Loops
from async_flowrl.benchmark.measure import Measured
from async_flowrl.benchmark.targets import Load, Results, Round, faster, targets
from async_flowrl.benchmark.variants import BASELINE, Machine

HEAD = (
    "variant",
    "step s",
    "images/s",
    "speed-up",
    "rollout busy",
    "trainer busy",
    "reward busy",
    "mean age",
    "controller CPU",
)
TARGET_HEAD = ("ratio", "target", "measured", "met")


def markdown(results: Results) -> str:
    """Returns runs, loops and targets as Markdown."""
    names = list(results.rounds[0].runs)
    rows = [_row(results, name) for name in names]
    ratios = [target.cells() for target in targets(results)]
    parts = [
        f"    {results.command}",
        as_sentence(results.description),
        markdown_table(HEAD, rows),
        _bound(results),
        markdown_table(TARGET_HEAD, ratios) if ratios else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in [head, *rows]]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])


def as_sentence(description: Mapping[str, str]) -> str:
    return "; ".join(f"{name} {value}" for name, value in description.items()) + "." if description else ""


def as_json(results: Results) -> dict[str, Any]:
    """Returns all measurements, with the bound of each repeat and the targets."""
    record = asdict(results)
    for inner, each in zip(record["rounds"], results.rounds, strict=True):
        inner["bound"] = results.bound(each.loops)
    record["targets"] = [{**asdict(target), "value": target.value, "met": target.met} for target in targets(results)]
    return record


def from_json(record: Mapping[str, Any]) -> Results:
    """Reads what `as_json` returned. Raises KeyError or TypeError for anything else."""
    rounds = [
        Round(Loops(**r["loops"]), {name: Measured(**run) for name, run in r["runs"].items()}) for r in record["rounds"]
    ]
    plain = {name: record[name] for name in ("command", "overrides", "description")}
    return Results(Machine(**record["machine"]), rounds, Load(**record["load"]), **plain)


def picture(results: Results, path: Path) -> None:
    """Draws images per second on all devices per variant: median, smallest and largest, and the bound as a line."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    names = list(results.rounds[0].runs)
    rates = [[r.runs[name].images_per_s for r in results.rounds] for name in names]
    middles = [median(values) for values in rates]
    below = [m - min(v) for m, v in zip(middles, rates, strict=True)]
    above = [max(v) - m for m, v in zip(middles, rates, strict=True)]
    figure, axes = pyplot.subplots(figsize=(8, 0.5 * len(names) + 1.6))
    colors = ["#7a7a7a" if name.startswith("sync") else "#1f5fa8" for name in names]
    axes.barh(names, middles, xerr=[below, above], color=colors, capsize=3)
    first = results.rounds[0].runs[names[0]]
    made = first.images_per_s * first.step_seconds
    bound = median(made / results.bound(r.loops) for r in results.rounds)
    axes.axvline(bound, color="#b23a48", linestyle="--", label="bound: max(G, T) of bare loops")
    axes.set_xlim(0, 1.35 * max(bound, *middles))
    axes.invert_yaxis()
    axes.set_xlabel(f"images per second over all {results.machine.devices} devices")
    axes.legend(loc="lower right")
    figure.tight_layout()
    # Without the software's version in the file, equal results give equal files.
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)


def _bound(results: Results) -> str:
    """Describes G, T, how they were measured, and the bound that follows."""
    machine, rounds = results.machine, results.rounds
    text = (
        f"G = {_middle(results, lambda r: r.loops.generation):.3g} and "
        f"T = {_middle(results, lambda r: r.loops.update):.3g} device-seconds per step (G:T = "
        f"{_middle(results, lambda r: results.generation(r.loops) / results.update(r.loops)):.2f} on "
        f"{machine.rollout} + {machine.trainer} devices): two bare loops side by side"
    )
    slower = [contention for r in rounds if (contention := r.loops.contention) is not None]
    if slower:
        generation, update = (median(values) for values in zip(*slower, strict=True))
        text += f", {generation:.2f} and {update:.2f} times what they take alone"
    bound = _middle(results, lambda r: results.bound(r.loops))
    return f"{text}. Bound: {bound:.3g} s per step. Median (least-most) of {len(rounds)} repeats."


def _row(results: Results, name: str) -> list[str]:
    runs = [r.runs[name] for r in results.rounds]
    busy = [f"{median(run.busy.get(pool, 0.0) for run in runs):.0%}" for pool in ("rollout", "trainer", "reward")]
    return [
        name,
        _spread([run.step_seconds for run in runs]),
        f"{median(run.images_per_s for run in runs):.1f}",
        _spread([faster(r, name) for r in results.rounds]) if results.has(BASELINE) else "",
        *busy,
        f"{median(run.staleness_mean for run in runs):.2f}",
        f"{median(run.controller_cpu for run in runs):.1%}",
    ]


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def _middle(results: Results, value: Callable[[Round], float]) -> float:
    return median(results.over(value))
