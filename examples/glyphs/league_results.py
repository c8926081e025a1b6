"""Results of the league (examples/glyphs/league.py), grouped by algorithm, and the choice of the learning rate."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from examples.glyphs.run_result import Result, load_all

LAST = 20
"""Number of last steps of a tuning run whose mean reward, on training words, decides about the learning rate."""


@dataclass(frozen=True)
class League:
    """All results. The mappings' keys are algorithms; a run that was not made has no entry.

    `tuning` has one run per learning rate, `judged` one run per seed at the chosen rate, and `pace` one short run whose
    seconds are valid (`Result.timed`).
    """

    algorithms: tuple[str, ...]
    rates: tuple[float, ...]
    tuning: Mapping[str, Mapping[float, Result]]
    judged: Mapping[str, Sequence[Result]]
    pace: Mapping[str, Result]
    reference: Mapping[str, float]
    """Name of a score to its value for the model before training."""

    def chosen(self, algorithm: str) -> float | None:
        """Returns the learning rate with the best tuning run; None until there is a run for every rate."""
        tuning = self.tuning[algorithm]
        return best_rate(tuning) if set(tuning) == set(self.rates) else None


def named(algorithm: str, rate: float) -> str:
    """Name of the runs of an algorithm at one learning rate, without the seed."""
    return f"{algorithm}-lr{rate:g}"


def tuned_score(result: Result) -> float:
    """Mean reward over the last `LAST` steps."""
    return fmean(result.reward[-LAST:])


def best_rate(tuning: Mapping[float, Result]) -> float:
    """Returns the learning rate with the highest `tuned_score`, the lowest of several equal ones."""
    return max(sorted(tuning), key=lambda rate: tuned_score(tuning[rate]))


def load_league(results: Path, algorithms: Sequence[str], rates: Sequence[float]) -> League:
    """Reads the folders tuning/, judged/ and pace/ of `results`, and reference.json; what is missing is left empty."""
    kept = {each: load_all(results / each) for each in ("tuning", "judged", "pace")}
    tuning = {
        algorithm: {rate: r for rate in rates for r in kept["tuning"] if r.variant == named(algorithm, rate)}
        for algorithm in algorithms
    }
    found = results / "reference.json"
    reference = json.loads(found.read_text(encoding="utf-8")) if found.is_file() else {}
    league = League(tuple(algorithms), tuple(rates), tuning, {}, {}, reference)
    judged: dict[str, list[Result]] = {}
    for algorithm in algorithms:
        rate = league.chosen(algorithm)
        judged[algorithm] = [] if rate is None else [r for r in kept["judged"] if r.variant == named(algorithm, rate)]
    pace = {r.variant: r for r in kept["pace"] if r.timed}
    return League(tuple(algorithms), tuple(rates), tuning, judged, pace, reference)
