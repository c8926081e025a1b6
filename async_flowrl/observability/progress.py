"""Numbers of a running training for the console (steps, rewards, speed, time left), and their text forms."""

import re
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

AVERAGED_STEPS = 20
"""Steps over which seconds per step and the time left are measured."""


@dataclass
class Progress:
    """Steps and evaluations that the console of a run has been told of."""

    total: int
    """Steps of the whole run."""
    clock: Callable[[], float] = time.monotonic
    done: int = 0
    """Number of finished steps, those before a resume included."""
    line: Mapping[str, Any] = field(default_factory=dict)
    """Metrics of the newest step; empty before the first."""
    lost: dict[int, Counter[str]] = field(default_factory=dict)
    """Step → what it could not score: number of skipped tickets, and of groups trained without an optional term."""

    def __post_init__(self) -> None:
        self._ends: deque[float] = deque([self.clock()], maxlen=AVERAGED_STEPS + 1)

    def begin(self) -> None:
        """Starts the clock of the first step; called when training begins."""
        if not self.line:
            self._ends[0] = self.clock()

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds the metrics of a finished step."""
        if step < self.done:  # The run went back to its last checkpoint because a trainer rank died.
            self.lost = {earlier: counts for earlier, counts in self.lost.items() if earlier < step}
        self.done, self.line = step + 1, metrics
        self._ends.append(self.clock())
        if lost := _lost(metrics):
            self.lost[step] = lost

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds per step over the last AVERAGED_STEPS steps; None before the first step."""
        return (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1) if len(self._ends) > 1 else None

    @property
    def seconds_left(self) -> float | None:
        """Expected seconds from the end of the newest step to the end of the run; None before the first step."""
        each = self.step_seconds
        return None if each is None else each * (self.total - self.done)

    @property
    def losses(self) -> list[str]:
        """Texts about skipped tickets and missing reward terms; [] if there are none."""
        total = sum(self.lost.values(), Counter())
        return [f"{count} {what}" for what, count in total.items()]


def _lost(metrics: Mapping[str, Any]) -> Counter[str]:
    """Counts of what a step trained without, by the words that follow the count; empty if nothing is missing."""
    lost = Counter({"tickets skipped": int(metrics.get("tickets_skipped") or 0)})
    for key, value in metrics.items():
        if value and (missing := re.fullmatch("reward/([^/]+)/missing", key)):
            lost[f"groups without {missing[1]}"] += int(value)
    return +lost


def number(value: Any, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)


def with_change(metrics: Mapping[str, float], name: str) -> str:
    """The mean of a curve and, in brackets, its change since the first evaluation ± half its 95 % interval.

    `metrics` has the keys of `evaluations.metric_keys`. Example: "0.4312 (+0.12 ± 0.03)".
    """
    changed, high = metrics.get(f"{name}/change"), metrics.get(f"{name}/change_high")
    text = number(metrics.get(f"{name}/mean"))
    if changed is None:
        return text
    return f"{text} ({changed:+.3g}{'' if high is None else f' ± {high - changed:.2g}'})"


def evaluated(metrics: Mapping[str, float]) -> tuple[str | None, Mapping[str, float]]:
    """("the baseline", metrics without the prefix `baseline/`), or (None, metrics) for a policy version."""
    if any(name.startswith("baseline/") for name in metrics):
        return "the baseline", {name.removeprefix("baseline/"): value for name, value in metrics.items()}
    return None, metrics


def evaluation_line(metrics: Mapping[str, float]) -> str:
    """One line with the means of the reward and of the held-out terms of an evaluation, with their changes."""
    parts = [f"reward {with_change(metrics, 'reward')}"]
    held_out = [name.removesuffix("/mean") for name in metrics if re.fullmatch("held_out/[^/]+/mean", name)]
    parts += [f"{name.replace('held_out/', 'held-out ')} {with_change(metrics, name)}" for name in held_out]
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Text "M:SS" or "H:MM:SS"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
