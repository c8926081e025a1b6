"""What is kept of one finished run: its curve, the scores of its adapter on held-out words, the load of the machine."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

T90 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833}
"""95 % quantiles of Student's t by degrees of freedom: the half width of a two-sided 90 % interval."""

BUSY = 1.5
"""Load average per core above which the seconds of a run do not count; one run alone brings it to 1 or so."""


@dataclass(frozen=True)
class Result:
    """`images`, `seconds`, `reward`: per step, the first two summed up. `evaluations`: (step, score), -1 = before."""

    variant: str
    seed: int
    images: list[float]
    seconds: list[float]
    reward: list[float]
    evaluations: list[tuple[int, float]]
    final: dict[str, float]
    """Scores of the trained adapter (`audit.scores`); empty where it was not measured."""
    load: float
    """Load average of the machine over the last 15 minutes of the run."""
    niceness: int
    """Above 0 the run took what others left of the processor: its seconds say nothing."""
    cores: int

    @property
    def timed(self) -> bool:
        """Whether its seconds say something: it gave way to nobody and had the machine nearly to itself."""
        return self.niceness == 0 and self.load <= BUSY * self.cores

    def save(self, path: Path) -> None:
        """Written beside its place and renamed: a file that is there is whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        temporary.replace(path)

    def seconds_to(self, score: float) -> float | None:
        """Seconds of training until the first evaluation with at least `score`; None if there was none."""
        return self._until(score, self.seconds)

    def images_to(self, score: float) -> float | None:
        """Images trained on until then."""
        return self._until(score, self.images)

    def _until(self, score: float, along: list[float]) -> float | None:
        reached = [step for step, value in self.evaluations if value >= score]
        return None if not reached else 0.0 if reached[0] < 0 else along[reached[0]]


def load_all(folder: Path) -> list[Result]:
    """Every result of a folder, by variant and seed."""
    read = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    results = [Result(**{**each, "evaluations": [tuple(pair) for pair in each["evaluations"]]}) for each in read]
    return sorted(results, key=lambda result: (result.variant, result.seed))


def pairs(results: Sequence[Result], one: str, other: str) -> list[tuple[Result, Result]]:
    """Runs of both variants with the same seed and equally many images."""
    found = {(r.variant, r.seed, r.images[-1]): r for r in results}
    return [
        (result, found[other, seed, images])
        for (variant, seed, images), result in sorted(found.items(), key=lambda item: item[0])
        if variant == one and (other, seed, images) in found
    ]


def score_differences(results: Sequence[Result], one: str, other: str, *, key: str = "ocr") -> list[float]:
    """Final score of `one` less that of `other`, by seed, where both have it."""
    both = pairs(results, one, other)
    return [a.final[key] - b.final[key] for a, b in both if key in a.final and key in b.final]


def time_ratios(results: Sequence[Result], one: str, other: str) -> list[float]:
    """Seconds of training of `one` as a share of those of `other`, by seed, where both are `timed`."""
    timed = [result for result in results if result.timed]
    return [a.seconds[-1] / b.seconds[-1] for a, b in pairs(timed, one, other)]


def goal_ratios(results: Sequence[Result], one: str, other: str, score: float) -> list[float]:
    """As `time_ratios`, of the seconds until an evaluation first had `score`; without pairs in which one never had."""
    timed = [result for result in results if result.timed]
    found = [(a.seconds_to(score), b.seconds_to(score)) for a, b in pairs(timed, one, other)]
    return [mine / theirs for mine, theirs in found if mine is not None and theirs]


def interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """90 % interval of the mean (Student's t); None for less than two differences or more than ten."""
    freedom = len(differences) - 1
    if freedom not in T90:
        return None
    half = T90[freedom] * stdev(differences) / math.sqrt(len(differences))
    return fmean(differences) - half, fmean(differences) + half
