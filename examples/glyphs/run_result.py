"""Result of one finished run of compare.py or league.py, and statistics of several results."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

T90 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833}
"""95 % quantiles of Student's t by degrees of freedom: half the width of a 90 % interval, in standard errors."""
T975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}
T975 |= {11: 2.201, 12: 2.179, 13: 2.160, 14: 2.145, 15: 2.131}
"""97.5 % quantiles: half the width of a 95 % interval, in standard errors."""

BUSY = 1.5
"""Load average per core above which the seconds of a run are not used; a run alone on the machine causes about 1."""


@dataclass(frozen=True)
class Result:
    """One run. `images`, `seconds` and `reward` are as in `curves.Curve`: per training step, the first two summed up.

    `evaluations` are pairs (step, OCR score on held-out words, which are not trained on); step -1 means before
    training.
    """

    variant: str
    seed: int
    images: list[float]
    seconds: list[float]
    reward: list[float]
    evaluations: list[tuple[int, float]]
    final: dict[str, float]
    """Scores of the trained LoRA (`audit.scores`); empty if it was not measured."""
    load: float
    """Load average of the machine over five minutes, taken after the run (older results: over 15)."""
    niceness: int
    """Above 0 the run got only the processor time that others left, so its seconds are not used."""
    cores: int

    @property
    def timed(self) -> bool:
        """True if the seconds are valid: no niceness, and the machine had little other work."""
        return self.niceness == 0 and self.load <= BUSY * self.cores

    def save(self, path: Path) -> None:
        """Writes JSON to a temporary file in the same folder, then renames it: an existing file is always complete."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        temporary.replace(path)

    def seconds_to(self, score: float) -> float | None:
        """Returns the seconds of training until the first evaluation of at least `score`.

        It is 0 if an evaluation before training reached it, and None if none did.
        """
        return self._until(score, self.seconds)

    def images_to(self, score: float) -> float | None:
        """Returns the images trained on until the first evaluation of at least `score`.

        It is 0 if an evaluation before training reached it, and None if none did.
        """
        return self._until(score, self.images)

    def _until(self, score: float, along: list[float]) -> float | None:
        reached = [step for step, value in self.evaluations if value >= score]
        return None if not reached else 0.0 if reached[0] < 0 else along[reached[0]]


def load_all(folder: Path) -> list[Result]:
    """Reads every result in a folder, sorted by variant and seed."""
    read = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    results = [Result(**{**each, "evaluations": [tuple(pair) for pair in each["evaluations"]]}) for each in read]
    return sorted(results, key=lambda result: (result.variant, result.seed))


def pairs(results: Sequence[Result], one: str, other: str) -> list[tuple[Result, Result]]:
    """Returns pairs of runs (of `one`, of `other`) with the same seed."""
    found = {(r.variant, r.seed): r for r in results}
    return [
        (result, found[other, seed])
        for (variant, seed), result in sorted(found.items(), key=lambda item: item[0])
        if variant == one and (other, seed) in found
    ]


def score_differences(results: Sequence[Result], one: str, other: str, *, key: str = "ocr") -> list[float]:
    """Returns the final score `key` of `one` minus that of `other`, for each pair in which both have it."""
    both = pairs(results, one, other)
    return [a.final[key] - b.final[key] for a, b in both if key in a.final and key in b.final]


def time_ratios(results: Sequence[Result], one: str, other: str) -> list[float]:
    """Returns the seconds of `one` divided by those of `other`, for each pair in which both are `timed`."""
    timed = [result for result in results if result.timed]
    return [a.seconds[-1] / b.seconds[-1] for a, b in pairs(timed, one, other)]


def goal_ratios(results: Sequence[Result], one: str, other: str, score: float) -> list[float]:
    """Returns the seconds of `one` divided by those of `other` until an evaluation reached `score`, by `timed` pair.

    Pairs are left out if a run never reached it, or if `other` had it before training.
    """
    timed = [result for result in results if result.timed]
    found = [(a.seconds_to(score), b.seconds_to(score)) for a, b in pairs(timed, one, other)]
    return [mine / theirs for mine, theirs in found if mine is not None and theirs]


def interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """Returns the 90 % confidence interval of the mean (Student's t); None unless there are two to ten differences."""
    freedom = len(differences) - 1
    if freedom not in T90:
        return None
    half = T90[freedom] * stdev(differences) / math.sqrt(len(differences))
    return fmean(differences) - half, fmean(differences) + half


def welch(ones: Sequence[float], others: Sequence[float]) -> tuple[float, float] | None:
    """Returns the 95 % confidence interval of mean(ones) - mean(others), of unpaired runs; None for fewer than two.

    It is Welch's (Biometrika 34, 1947), with the degrees of freedom rounded down.
    """
    if min(len(ones), len(others)) < 2:
        return None
    squared = [stdev(each) ** 2 / len(each) for each in (ones, others)]
    freedom = sum(squared) ** 2 / sum(s**2 / (len(e) - 1) for s, e in zip(squared, (ones, others), strict=True))
    middle, half = fmean(ones) - fmean(others), T975[min(int(freedom), max(T975))] * math.sqrt(sum(squared))
    return middle - half, middle + half
