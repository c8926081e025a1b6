"""Laws of durations: constant, log-normal with a given mean and spread, or as measured."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev


@dataclass(frozen=True)
class Law:
    """Durations in seconds. With `samples` their empirical distribution; otherwise log-normal with this mean and CV."""

    mean: float
    cv: float = 0.0
    """Standard deviation ÷ mean."""
    samples: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean) and self.mean >= 0 and math.isfinite(self.cv) and self.cv >= 0):
            raise ValueError(f"a duration needs a finite mean and spread >= 0, got mean {self.mean} and cv {self.cv}")

    @classmethod
    def measured(cls, samples: Sequence[float]) -> "Law":
        """The empirical distribution of `samples`; nothing measured means it takes no time."""
        if not samples:
            return cls(0.0)
        mean = fmean(samples)
        return cls(mean, pstdev(samples) / mean if mean > 0 else 0.0, tuple(sorted(samples)))

    def draw(self, key: str) -> float:
        """The duration of the event called `key`.

        It is the same every time, whatever else is drawn, so two plans are compared on the same durations.
        """
        if self.cv == 0 or self.mean == 0:
            return self.mean
        source = random.Random(key)
        if self.samples:
            return source.choice(self.samples)
        variance = math.log1p(self.cv * self.cv)
        return self.mean * math.exp(source.gauss(0.0, math.sqrt(variance)) - variance / 2)

    def scaled(self, factor: float) -> "Law":
        """Everything takes `factor` times as long."""
        return replace(self, mean=self.mean * factor, samples=tuple(x * factor for x in self.samples))

    def plus(self, seconds: float) -> "Law":
        """Everything takes `seconds` longer."""
        mean = self.mean + seconds
        cv = self.cv * self.mean / mean if mean > 0 else 0.0
        return Law(mean, cv, tuple(x + seconds for x in self.samples))
