"""evaluations.jsonl: every number that an evaluation measured, so that any two of them can be compared later.

One JSON object per evaluation, oldest first; docs/run_directory.md lists the fields.
"""

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from async_flowrl.observability.events import cut_unfinished_line, read_events
from async_flowrl.observability.statistics import Change, Estimate, change, estimate

TRAINED, HELD_OUT, DIVERSITY = "trained", "held_out", "diversity"
"""Kinds of curves: by the training's reward and its terms, by terms that no image is trained on, and distances of
images."""


@dataclass(frozen=True)
class Curve:
    """What one score says of one evaluation's images."""

    kind: str
    weight: float
    """Its sign says which way is better; 0 is judged by nothing."""
    source: str
    """Digest of the term's name and options, and of the file that a term of one's own is in: only curves of the same
    source are compared."""
    scores: Mapping[int, tuple[float, ...]]
    """Place of the prompt → one number per image in the order of the noises; of diversity, one number."""

    @property
    def sign(self) -> float:
        return -1.0 if self.weight < 0 else 1.0

    def estimate(self) -> Estimate:
        return self._estimate

    @cached_property
    def _estimate(self) -> Estimate:
        return estimate(self.scores)


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of a policy version, or of the base model as it is usually sampled (`baseline`)."""

    version: int
    baseline: bool
    setting: str
    """Digest of prompts, noises, steps and guidance: evaluations of the same setting are compared image by image."""
    steps: int
    guidance: float
    curves: Mapping[str, Curve]
    """Only those that have a score."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> "Evaluation":
        curves = {
            name: Curve(
                curve["kind"],
                curve["weight"],
                curve["source"],
                {int(place): tuple(scores) for place, scores in curve["scores"].items()},
            )
            for name, curve in line["curves"].items()
        }
        return cls(**{**line, "curves": curves})


def comparable(name: str, now: Evaluation, before: Evaluation) -> bool:
    """Whether both have the curve, by the same term on images of the same prompts and noises."""
    one, other = now.curves.get(name), before.curves.get(name)
    if one is None or other is None or now.setting != before.setting:
        return False
    return one.source == other.source and not one.scores.keys().isdisjoint(other.scores)


def between(name: str, now: Evaluation, before: Evaluation) -> Change | None:
    """The change of one curve from one evaluation to another; None where they cannot be compared."""
    if not comparable(name, now, before):
        return None
    return change(now.curves[name].scores, before.curves[name].scores)


def first_comparable(history: Sequence[Evaluation], now: Evaluation) -> Evaluation | None:
    """The oldest earlier evaluation of a policy version with the same prompts and noises: version 0's, usually."""
    earlier = [e for e in history if not e.baseline and e.version < now.version and e.setting == now.setting]
    return min(earlier, key=lambda each: each.version, default=None)


def first_of(name: str, history: Sequence[Evaluation], now: Evaluation) -> Evaluation | None:
    """The same, of one curve: the oldest evaluation that it can be compared with."""
    return first_comparable([earlier for earlier in history if comparable(name, now, earlier)], now)


def metric_keys(now: Evaluation, history: Sequence[Evaluation]) -> dict[str, float]:
    """`<name>/mean` and so on of every curve; held-out ones are `held_out/<name>/mean`. Without what is not known."""
    keys: dict[str, float | None] = {}
    for name, curve in now.curves.items():
        prefix = f"held_out/{name}" if curve.kind == HELD_OUT else name
        found = curve.estimate()
        keys |= {f"{prefix}/{field}": getattr(found, field) for field in ("mean", "std", "stderr", "low", "high")}
        first = None if now.baseline else first_of(name, history, now)
        if first is not None and (moved := between(name, now, first)) is not None:
            keys |= {f"{prefix}/{field}": value for field, value in moved.fields().items()}
    return {name: value for name, value in keys.items() if value is not None}


class EvaluationLog:
    """The file and what it holds, in the order in which the evaluations were recorded. Safe between threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        cut_unfinished_line(path)
        self._records = [Evaluation.from_json(line) for line in read_events(path)] if path.exists() else []

    @property
    def records(self) -> tuple[Evaluation, ...]:
        with self._lock:
            return tuple(self._records)

    def policy(self, version: int) -> Evaluation | None:
        """The record of a version; of the base model's own row, see `baseline`."""
        return next((e for e in self.records if e.version == version and not e.baseline), None)

    def baseline(self) -> Evaluation | None:
        return next((e for e in self.records if e.baseline), None)

    def add(self, evaluation: Evaluation) -> None:
        """On disk when it returns; takes the place of an earlier record of the same version."""
        same = (evaluation.version, evaluation.baseline)
        self._keep(lambda e: (e.version, e.baseline) != same, evaluation)

    def truncate(self, version: int) -> None:
        """Forgets the versions after `version`, for a run that goes on from its checkpoint."""
        self._keep(lambda e: e.version <= version)

    def _keep(self, wanted: Callable[[Evaluation], bool], *more: Evaluation) -> None:
        with self._lock:
            self._records = [e for e in self._records if wanted(e)] + list(more)
            temporary = self.path.with_suffix(".tmp")
            with temporary.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(e.to_json(), allow_nan=False) + "\n" for e in self._records)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)


def read_evaluations(path: Path) -> list[Evaluation]:
    """Of a run directory's file; none where there is no such file."""
    return [Evaluation.from_json(line) for line in read_events(path)] if path.exists() else []
