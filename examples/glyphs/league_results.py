"""What the league's runs left, by algorithm, and which learning rate the tuning runs choose."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from examples.glyphs.result import Result, load_all

LAST = 20
"""Steps at the end of a tuning run whose mean reward, on training words, chooses the learning rate."""


@dataclass(frozen=True)
class League:
    """By algorithm: `tuning`, a run per learning rate; `judged`, the runs at the chosen one, by seed; `pace`, a short
    run whose seconds count. What was not run is not there."""

    algorithms: tuple[str, ...]
    rates: tuple[float, ...]
    tuning: Mapping[str, Mapping[float, Result]]
    judged: Mapping[str, Sequence[Result]]
    pace: Mapping[str, Result]
    reference: Mapping[str, float]
    """Scores of the weights that every run starts from."""

    def chosen(self, algorithm: str) -> float | None:
        """The learning rate that `algorithm` is judged with; None until its tuning is complete."""
        tuning = self.tuning[algorithm]
        return best_rate(tuning) if set(tuning) == set(self.rates) else None


def named(algorithm: str, rate: float) -> str:
    """Name of the runs of an algorithm at a learning rate."""
    return f"{algorithm}-lr{rate:g}"


def tuned_score(result: Result) -> float:
    """Mean reward over the last `LAST` steps."""
    return fmean(result.reward[-LAST:])


def best_rate(tuning: Mapping[float, Result]) -> float:
    """The learning rate with the highest score; the lowest of equals."""
    return max(sorted(tuning), key=lambda rate: tuned_score(tuning[rate]))


def load_league(results: Path, algorithms: Sequence[str], rates: Sequence[float]) -> League:
    """What is in the folders tuning/, judged/ and pace/ of `results`, and its reference.json."""
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
