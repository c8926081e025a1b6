"""The results as a table (JSON, Markdown), a list of targets and a picture."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from async_flowrl.benchmarking.loops import Loops
from async_flowrl.benchmarking.measure import Measured
from async_flowrl.benchmarking.variants import BASELINE, Machine

TICKETS_PER_WORKER = 8
"""From here on on-policy streaming is expected to pay."""
HEAD = "| variant | step s | images/s | speed-up | rollout busy | trainer busy | mean age | controller CPU |"


@dataclass(frozen=True)
class Round:
    """One repeat: the bare loops and every variant, run one after another."""

    loops: Loops
    runs: Mapping[str, Measured]

    def colocated(self) -> Measured | None:
        """The fastest colocated variant of this repeat."""
        found = [run for name, run in self.runs.items() if name.startswith("sync colocated")]
        return min(found, key=lambda run: run.step_seconds) if found else None


@dataclass(frozen=True)
class Target:
    """A ratio with what it should be; `values` has one per repeat."""

    what: str
    values: tuple[float, ...]
    at_least: float | None = None
    at_most: float | None = None

    @property
    def value(self) -> float:
        return median(self.values)

    @property
    def met(self) -> bool:
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )

    def line(self) -> str:
        wanted = f">= {self.at_least:g}" if self.at_least is not None else f"<= {self.at_most:g}"
        verdict = "yes" if self.met else "NO"
        return (
            f"| {self.what} | {wanted} | {self.value:.3f} ({min(self.values):.3f}-{max(self.values):.3f}) | {verdict} |"
        )


@dataclass(frozen=True)
class Results:
    """Everything that was measured, and on what."""

    machine: Machine
    rounds: Sequence[Round]
    tickets_per_worker: float
    reward_latency: float
    overrides: Sequence[str]

    def bound(self, loops: Loops) -> float:
        """max(G, T) of the split, seconds per step."""
        return max(loops.generation / self.machine.rollout, loops.update / self.machine.trainer)

    def over(self, ratio: Callable[[Round], float]) -> tuple[float, ...]:
        return tuple(ratio(found) for found in self.rounds)


def targets(results: Results) -> list[Target]:
    """The ratios, each taken within one repeat."""
    over, machine = results.over, results.machine
    one = "one_step_off"
    found = [
        Target(
            "one_step_off step ÷ max(G,T)",
            over(lambda r: r.runs[one].step_seconds / results.bound(r.loops)),
            at_most=1.05,
        ),
        Target(
            "sync separate step ÷ (G+T+S)",
            over(lambda r: r.runs[BASELINE].step_seconds / _in_turn(results, r)),
            at_most=1.05,
        ),
        Target(
            "one_step_off speed-up ÷ its ceiling (G+T+S)/max(G,T)",
            over(lambda r: _faster(r, one) * results.bound(r.loops) / _in_turn(results, r)),
            at_least=0.95,
        ),
        Target(
            "rollout images/s ÷ bare loop's",
            over(lambda r: r.loops.generation / r.runs[one].generation),
            at_least=0.95,
        ),
        Target(
            "update ÷ bare loop's (rate)",
            over(lambda r: r.loops.update / machine.trainer / r.runs[one].update),
            at_least=0.95,
        ),
        Target(
            "trainer stall of a publish ÷ step",
            over(lambda r: r.runs[one].trainer_stall / r.runs[one].step_seconds),
            at_most=0.01,
        ),
        Target(
            "worker stall of a publish ÷ step",
            over(lambda r: r.runs[one].worker_stall / r.runs[one].step_seconds),
            at_most=0.01,
        ),
        Target("controller CPU ÷ wall clock", over(lambda r: r.runs[one].controller_cpu), at_most=0.05),
    ]
    if results.tickets_per_worker >= TICKETS_PER_WORKER and "stream" in results.rounds[0].runs:
        found.append(Target("stream ÷ sync separate (speed)", over(lambda r: _faster(r, "stream")), at_least=1.5))
    if results.reward_latency > 0 and all(r.colocated() for r in results.rounds):
        found.append(Target("one_step_off ÷ best sync colocated (speed)", over(_against_colocated), at_least=1.2))
    return found


def markdown(results: Results) -> str:
    """Table, loops and targets, ready for a page of documentation."""
    loops = results.rounds[-1].loops
    names = list(results.rounds[0].runs)
    generation, update = (median(x) for x in zip(*[r.loops.contention for r in results.rounds], strict=True))
    lines = [
        HEAD,
        "|" + "---|" * 8,
        *[_row(results, name) for name in names],
        "",
        f"G = {_middle(results, lambda r: r.loops.generation):.3g} and "
        f"T = {_middle(results, lambda r: r.loops.update):.3g} "
        f"device-seconds per step: two bare loops side by side ({generation:.2f} and {update:.2f} times what they take "
        f"alone). Bound max(G,T) with {results.machine.rollout} + {results.machine.trainer} devices: "
        f"{results.bound(loops):.3g} s in the last of {len(results.rounds)} repeats.",
        "",
        "| ratio, median (least-most) of the repeats | target | measured | met |",
        "|---|---|---|---|",
        *[target.line() for target in targets(results)],
    ]
    return "\n".join(lines) + "\n"


def as_json(results: Results) -> dict[str, Any]:
    return {
        "machine": asdict(results.machine),
        "overrides": list(results.overrides),
        "rounds": [
            {
                "loops": asdict(r.loops),
                "bound": results.bound(r.loops),
                "runs": {n: asdict(m) for n, m in r.runs.items()},
            }
            for r in results.rounds
        ],
        "targets": [{**asdict(target), "value": target.value, "met": target.met} for target in targets(results)],
    }


def picture(results: Results, path: Path) -> None:
    """Images/s over all devices per variant, with the least and the most, and the bound as a line."""
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
    axes.invert_yaxis()
    axes.set_xlabel(f"images per second over all {results.machine.devices} devices")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _row(results: Results, name: str) -> str:
    runs = [r.runs[name] for r in results.rounds]
    speed = [_faster(r, name) for r in results.rounds]
    cells = [
        name,
        _spread([run.step_seconds for run in runs]),
        f"{median(run.images_per_s for run in runs):.1f}",
        _spread(speed),
        f"{median(run.busy.get('rollout', 0.0) for run in runs):.0%}",
        f"{median(run.busy.get('trainer', 0.0) for run in runs):.0%}",
        f"{median(run.staleness_mean for run in runs):.2f}",
        f"{median(run.controller_cpu for run in runs):.1%}",
    ]
    return f"| {' | '.join(cells)} |"


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def _in_turn(results: Results, found: Round) -> float:
    """G + T + S: what a synchronous step of this split takes at best; S is the median delivery."""
    loops = found.loops
    parts = loops.generation / results.machine.rollout, loops.update / results.machine.trainer
    return sum(parts) + found.runs[BASELINE].publish


def _faster(found: Round, name: str) -> float:
    return found.runs[BASELINE].step_seconds / found.runs[name].step_seconds


def _against_colocated(found: Round) -> float:
    best = found.colocated()
    assert best is not None
    return best.step_seconds / found.runs["one_step_off"].step_seconds


def _middle(results: Results, value: Callable[[Round], float]) -> float:
    return median(results.over(value))
