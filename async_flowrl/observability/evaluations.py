"""Evaluations of a run: their scores per image, the file evaluations.jsonl that keeps them, and their comparison.

Evaluations of one run use the same prompts and the same initial noises, so two of them can be compared image by image.
The file has one JSON object per evaluation, oldest first; docs/run_directory.md lists the fields. A *curve* is one
score, e.g. the reward, of all images of an evaluation; a *held-out* term is a score that nothing is trained on.
"""

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from async_flowrl.config.paths import replace_file
from async_flowrl.observability.events import cut_unfinished_line, read_events
from async_flowrl.observability.statistics import Change, Estimate, change, estimate

# Kinds of curves: the trained reward and its terms, held-out terms, and the distance between images of a prompt.
TRAINED, HELD_OUT, DIVERSITY = "trained", "held_out", "diversity"


@dataclass(frozen=True)
class Curve:
    """One score of all images of one evaluation.

    `weight`: larger scores are better if positive, smaller ones if negative; the hacking alarm ignores 0. `source` is
    the digest of the reward term's name and options (and of its source file, if the user wrote the term); only curves
    with the same source are compared. `scores`: index of the prompt → one score per image, in the order of the noises.
    """

    kind: str
    weight: float
    source: str
    scores: Mapping[int, tuple[float, ...]]

    @property
    def sign(self) -> float:
        return -1.0 if self.weight < 0 else 1.0

    @cached_property
    def estimate(self) -> Estimate:
        return estimate(self.scores)


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of a policy version, or of the base model with its family's usual sampling (`baseline`).

    `setting` is the digest of prompts, noises, denoising steps and guidance; only evaluations with the same one are
    compared. `guidance` is the larger of the two scales. Curves without any score are left out.
    """

    version: int
    baseline: bool
    setting: str
    steps: int
    guidance: float
    curves: Mapping[str, Curve]
    # Held-out term → name of a numeric extra → its mean over all images.
    extras: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> "Evaluation":
        curves = {}
        for name, curve in line["curves"].items():
            scores = {int(place): tuple(by_image) for place, by_image in curve["scores"].items()}
            curves[name] = Curve(curve["kind"], curve["weight"], curve["source"], scores)
        return cls(**{**line, "curves": curves})


def policy_versions(history: Iterable[Evaluation]) -> list[Evaluation]:
    return sorted((e for e in history if not e.baseline), key=lambda e: e.version)


def comparable(name: str, now: Evaluation, before: Evaluation) -> bool:
    """True if both evaluations have the curve `name` with the same source, the same setting and a common prompt."""
    one, other = now.curves.get(name), before.curves.get(name)
    if one is None or other is None or now.setting != before.setting:
        return False
    return one.source == other.source and not one.scores.keys().isdisjoint(other.scores)


def between(name: str, now: Evaluation, before: Evaluation) -> Change | None:
    if not comparable(name, now, before):
        return None
    return change(now.curves[name].scores, before.curves[name].scores)


def first_with_setting(history: Sequence[Evaluation], now: Evaluation) -> Evaluation | None:
    """The evaluation of the lowest version below `now`'s with the same setting (usually version 0), or None."""
    earlier = [e for e in history if not e.baseline and e.version < now.version and e.setting == now.setting]
    return min(earlier, key=lambda e: e.version, default=None)


def since_first(name: str, now: Evaluation, history: Sequence[Evaluation]) -> Change | None:
    """Paired change of the curve `name` since the lowest comparable version; None without one, and for the baseline."""
    first = first_with_setting([earlier for earlier in history if comparable(name, now, earlier)], now)
    return None if now.baseline or first is None else between(name, now, first)


def metric_keys(now: Evaluation, history: Sequence[Evaluation]) -> dict[str, float]:
    """Keys of an evaluation for metrics.jsonl and trackers: `<curve>/mean`, `/std`, `/stderr`, `/low`, `/high`.

    If an earlier evaluation is comparable, the paired change since the first one is added. Held-out curves get the
    prefix `held_out/`, and the means of their extras are `held_out/<curve>/extra/<name>`. Unknown numbers are left out.
    """
    keys: dict[str, float | None] = {}
    for name, curve in now.curves.items():
        prefix = f"held_out/{name}" if curve.kind == HELD_OUT else name
        estimate = curve.estimate
        keys |= {f"{prefix}/{kind}": getattr(estimate, kind) for kind in ("mean", "std", "stderr", "low", "high")}
        if (moved := since_first(name, now, history)) is not None:
            keys |= {f"{prefix}/{kind}": value for kind, value in moved.fields().items()}
    keys |= {f"held_out/{term}/extra/{name}": mean for term, by in now.extras.items() for name, mean in by.items()}
    return {name: value for name, value in keys.items() if value is not None}


class EvaluationLog:
    """All evaluations of a run, in the order in which they were recorded, kept in memory and in the file `path`.

    An existing file is read, without an unfinished last line. Raises ValueError for a broken line. Thread-safe.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        cut_unfinished_line(path)
        self._records = read_evaluations(path)

    @property
    def records(self) -> tuple[Evaluation, ...]:
        with self._lock:
            return tuple(self._records)

    def policy(self, version: int) -> Evaluation | None:
        return next((e for e in self.records if e.version == version and not e.baseline), None)

    def baseline(self) -> Evaluation | None:
        return next((e for e in self.records if e.baseline), None)

    def add(self, evaluation: Evaluation) -> None:
        """Adds an evaluation, or replaces the one of the same version; the file is synced before this returns."""
        same = (evaluation.version, evaluation.baseline)
        self._keep(lambda e: (e.version, e.baseline) != same, evaluation)

    def truncate(self, version: int) -> None:
        self._keep(lambda e: e.version <= version)

    def _keep(self, keeps: Callable[[Evaluation], bool], *more: Evaluation) -> None:
        with self._lock:
            self._records = [e for e in self._records if keeps(e)] + list(more)
            lines = [json.dumps(asdict(e), allow_nan=False) + "\n" for e in self._records]
            replace_file(self.path, "".join(lines))


def read_evaluations(path: Path) -> list[Evaluation]:
    return [Evaluation.from_json(line) for line in read_events(path)] if path.exists() else []
