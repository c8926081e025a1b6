"""The numbers of a run so far, as the console shows them, and how they are written."""

import re
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

AVERAGED_STEPS = 20
"""Steps over which seconds per step, images per second and the time left are measured."""
MAX_REWARDS = 1024
"""Newest steps whose reward is kept for the spark line."""


@dataclass
class Progress:
    """Steps and evaluations of a run, as its console has heard of them."""

    total: int
    clock: Callable[[], float] = time.monotonic
    done: int = 0
    """Steps."""
    line: Mapping[str, Any] = field(default_factory=dict)
    """Metrics of the newest step."""
    rewards: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MAX_REWARDS))
    """Step and mean reward of each step that had one."""
    lost: dict[int, Counter[str]] = field(default_factory=dict)
    """By step, what could not be scored: tickets that were skipped, and groups trained without an optional term."""
    evaluation: tuple[str, Mapping[str, float]] | None = None
    """The newest evaluation of a policy version: its title, and its metrics."""

    def __post_init__(self) -> None:
        self.began = self.clock()
        self._ends: deque[tuple[float, int]] = deque([(self.began, 0)], maxlen=AVERAGED_STEPS + 1)

    def begin(self) -> None:
        """Training begins now: what came before it is no part of the first step."""
        if not self.line:
            self._ends[0] = self.clock(), 0

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A step is done."""
        if step < self.done:  # A trainer rank has died: the steps since the last checkpoint are made again.
            self.rewards = deque((entry for entry in self.rewards if entry[0] < step), maxlen=MAX_REWARDS)
            self.lost = {earlier: counts for earlier, counts in self.lost.items() if earlier < step}
        self.done, self.line = step + 1, metrics
        self._ends.append((self.clock(), int(metrics.get("images") or 0)))
        if (reward := metrics.get("reward/mean")) is not None:
            self.rewards.append((step, float(reward)))
        if lost := _lost(metrics):
            self.lost[step] = lost

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds of the newest steps; None before the first."""
        return (self._ends[-1][0] - self._ends[0][0]) / (len(self._ends) - 1) if len(self._ends) > 1 else None

    @property
    def images_per_second(self) -> float | None:
        """Of training, over the newest steps."""
        seconds = self._ends[-1][0] - self._ends[0][0]
        images = sum(count for _, count in list(self._ends)[1:])
        return images / seconds if seconds > 0 and images else None

    @property
    def seconds_left(self) -> float | None:
        """From the end of the newest step to the end of the last."""
        each = self.step_seconds
        return None if each is None else each * (self.total - self.done)

    @property
    def since_step(self) -> float:
        """Seconds since the newest step ended, or since training began."""
        return self.clock() - self._ends[-1][0]

    @property
    def losses(self) -> list[str]:
        """What was trained without, in words."""
        total = sum(self.lost.values(), Counter())
        return [f"{count} {what}" for what, count in total.items()]


def _lost(metrics: Mapping[str, Any]) -> Counter[str]:
    """What a step trained without, by the words that follow the count; empty where nothing is missing."""
    lost = Counter({"tickets skipped": int(metrics.get("tickets_skipped") or 0)})
    for key, value in metrics.items():
        if value and (missing := re.fullmatch("reward/([^/]+)/missing", key)):
            lost[f"groups without {missing[1]}"] += int(value)
    return +lost


def number(value: Any, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)


def with_change(metrics: Mapping[str, float], name: str) -> str:
    """A mean, and in brackets what it has changed by since the first evaluation, ± half of the 95 % interval."""
    changed, high = metrics.get(f"{name}/change"), metrics.get(f"{name}/change_high")
    text = number(metrics.get(f"{name}/mean"))
    if changed is None:
        return text
    return f"{text} ({changed:+.3g}{'' if high is None else f' ± {high - changed:.2g}'})"


def evaluated(metrics: Mapping[str, float]) -> tuple[str | None, Mapping[str, float]]:
    """Whose metrics these are, "the baseline" or None for a policy version, and the metrics by their plain names."""
    if any(name.startswith("baseline/") for name in metrics):
        return "the baseline", {name.removeprefix("baseline/"): value for name, value in metrics.items()}
    return None, metrics


def evaluation_line(metrics: Mapping[str, float]) -> str:
    """The reward and the held-out terms of an evaluation."""
    parts = [f"reward {with_change(metrics, 'reward')}"]
    held_out = [name.removesuffix("/mean") for name in metrics if re.fullmatch("held_out/[^/]+/mean", name)]
    parts += [f"{name.replace('held_out/', 'held-out ')} {with_change(metrics, name)}" for name in held_out]
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Minutes and seconds, or hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
