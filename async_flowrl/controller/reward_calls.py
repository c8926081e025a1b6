"""RewardCalls counts retries and failures of each reward term per training step, for metrics.jsonl."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from async_flowrl.types import Scores


@dataclass
class RewardCalls:
    """Counts retries and failures for the training groups scored since the last start or recovery of the run.

    Scores that were read from scores.jsonl are not counted.
    """

    _retries: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    _failures: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def add(self, step: int, scores: Scores) -> None:
        """Adds the retries and failures of one group of `step`."""
        self._retries[step].update(scores.retries)
        self._failures[step].update(scores.failed.keys())

    def pop(self, step: int) -> dict[str, float]:
        """Removes and returns the step's counts: metric name → count, without zeros.

        The names are `reward/<term>/retries` and `reward/<term>/failures`.
        """
        counts = {"retries": self._retries.pop(step, Counter()), "failures": self._failures.pop(step, Counter())}
        return {f"reward/{term}/{what}": n for what, by_term in counts.items() for term, n in sorted(by_term.items())}
