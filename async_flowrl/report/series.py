"""Curves of a report: metrics and evaluation scores of a run over training steps, images and seconds."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeVar

from async_flowrl.observability.evaluations import Evaluation
from async_flowrl.observability.metrics import Metrics
from async_flowrl.report.records import Records

# Most points of a curve.
MAX_POINTS = 400
T = TypeVar("T")


def bucket_width(count: int) -> int:
    return max(1, -(-count // MAX_POINTS))


def in_buckets(values: Sequence[T]) -> list[Sequence[T]]:
    width = bucket_width(len(values))
    return [values[start : start + width] for start in range(0, len(values), width)]


def curve(values: Sequence[float | None]) -> dict[str, list[float | None]]:
    """`y`: the mean of each bucket without None; `low` and `high`: its range, if buckets hold several values."""
    groups = [[value for value in bucket if value is not None] for bucket in in_buckets(values)]
    drawn = {"y": [sum(group) / len(group) if group else None for group in groups]}
    if bucket_width(len(values)) > 1:
        drawn |= {"low": [min(group, default=None) for group in groups]}
        drawn |= {"high": [max(group, default=None) for group in groups]}
    return drawn


def chosen(values: Sequence[T], most: int) -> list[T]:
    """At most `most` of the values, evenly spaced, with the first and the last one (the last only if `most` is 1)."""
    if len(values) <= most:
        return list(values)
    if most < 2:
        return list(values[-most:]) if most else []
    last = len(values) - 1
    return [values[i] for i in sorted({round(index * last / (most - 1)) for index in range(most)})]


def rounded(value: Any) -> Any:
    """The value with all floats, also those in its lists and dictionaries, rounded to six significant digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def lines_of(run: Records) -> tuple[dict[str, Any], dict[str, Any]]:
    """(name → x axes, key → curve) of a run.

    There are two sets of x axes, "training" and "evaluation", each with `step`, `images` and `seconds`. A curve has `x`
    (the name of its set), `y`, and `low` and `high` if it has a band.
    """
    steps = [int(line["step"]) for line in run.metrics]
    images = list(accumulate(int(line.get("images") or 0) for line in run.metrics))
    seconds = list(accumulate(line.get("timing/step") or 0.0 for line in run.metrics))
    axes: dict[str, Sequence[float]] = {"step": steps, "images": images, "seconds": seconds}
    evaluated = chosen(run.policy, MAX_POINTS)
    places = {step: place for place, step in enumerate(steps)}
    before = [places.get(evaluation.version - 1) for evaluation in evaluated]
    at = {name: [0 if place is None else values[place] for place in before] for name, values in axes.items()}
    x: dict[str, Any] = {
        "training": {name: [bucket[-1] for bucket in in_buckets(values)] for name, values in axes.items()},
        "evaluation": at | {"step": [evaluation.version for evaluation in evaluated]},
    }
    lines = {key: {"x": "training", **curve(values)} for key, values in columns(run.metrics).items()}
    return x, lines | evaluation_lines(evaluated)


def columns(metrics: Sequence[Metrics]) -> dict[str, list[float | None]]:
    """Key → one value per line of metrics.jsonl (None: missing), for all keys with numbers.

    `kept:<age>` is added: the share of the gradient that clipping and masking left, by age of the images in versions.
    """
    keys = dict.fromkeys(key for line in metrics for key in line)
    numbers = {key: [_number(line.get(key)) for line in metrics] for key in keys}
    for key in [key for key in keys if key.startswith("kept_of/")]:
        age = key.removeprefix("kept_of/")
        pairs = zip(numbers.get(f"kept/{age}", [None] * len(metrics)), numbers[key], strict=True)
        numbers[f"kept:{age}"] = [(kept or 0.0) / of if of else None for kept, of in pairs]
    return {key: values for key, values in numbers.items() if any(value is not None for value in values)}


def evaluation_lines(evaluated: Sequence[Evaluation]) -> dict[str, Any]:
    """`evaluation:<kind>:<name>` → curve of the means, with the 95 % interval as its band if it is known."""
    kinds = {name: curve.kind for e in evaluated for name, curve in e.curves.items()}
    lines: dict[str, Any] = {}
    for name, kind in kinds.items():
        estimates = [e.curves[name].estimate if name in e.curves else None for e in evaluated]
        line: dict[str, Any] = {"x": "evaluation", "y": [e.mean if e else None for e in estimates]}
        if any(e is not None and e.low is not None for e in estimates):
            line |= {"low": [e.low if e else None for e in estimates]}
            line |= {"high": [e.high if e else None for e in estimates]}
        lines[f"evaluation:{kind}:{name}"] = line
    return lines


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
