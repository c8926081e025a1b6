"""Laws (probability distributions) of durations: constant, log-normal, or the distribution of measured samples."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev


@dataclass(frozen=True)
class Law:
    """Distribution of a duration in seconds. Raises ValueError for a mean or `cv` that is negative or not finite.

    Without spread (`cv` or `mean` of 0) it is constant. With `samples` it is their empirical distribution, otherwise
    it is log-normal.
    """

    mean: float
    cv: float = 0.0
    """Coefficient of variation: standard deviation ÷ mean."""
    samples: tuple[float, ...] = ()
    """Measured durations in seconds."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and self.mean >= 0 and math.isfinite(self.cv) and self.cv >= 0):
            raise ValueError(f"a duration needs a finite mean and spread >= 0, got mean {self.mean} and cv {self.cv}")

    @classmethod
    def measured(cls, samples: Sequence[float]) -> "Law":
        """Returns the empirical distribution of `samples`; without samples the duration is always 0."""
        if not samples:
            return cls(0.0)
        mean = fmean(samples)
        return cls(mean, pstdev(samples) / mean if mean > 0 else 0.0, tuple(sorted(samples)))

    def draw(self, key: str) -> float:
        """Returns the duration of the event called `key`, in seconds.

        It depends on the law and the key only, not on earlier draws, so two plans are compared on the same durations.
        """
        if self.cv == 0 or self.mean == 0:
            return self.mean
        source = random.Random(key)
        if self.samples:
            return source.choice(self.samples)
        variance = math.log1p(self.cv * self.cv)
        return self.mean * math.exp(source.gauss(0.0, math.sqrt(variance)) - variance / 2)

    def scaled(self, factor: float) -> "Law":
        """Returns this law with every duration multiplied by `factor`."""
        return replace(self, mean=self.mean * factor, samples=tuple(x * factor for x in self.samples))
