"""Counts of calls of each term of the reward, by training step: retries and failures."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from async_flowrl.types import Scores


@dataclass
class RewardCalls:
    """Counts of what was called in this attempt of a run; scores that a resume finds written down were not."""

    _retries: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    _failures: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def add(self, step: int, scores: Scores) -> None:
        """Counts one group's calls."""
        self._retries[step].update(scores.retries)
        self._failures[step].update(scores.failed.keys())

    def pop(self, step: int) -> dict[str, float]:
        """The step's counts by the names of metrics.jsonl, without zeros; they are forgotten."""
        counts = {"retries": self._retries.pop(step, Counter()), "failures": self._failures.pop(step, Counter())}
        return {f"reward/{term}/{what}": n for what, by_term in counts.items() for term, n in sorted(by_term.items())}
