"""Statistics of one optimizer step: float64 sums per group, added over the ranks in rank order."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import time

import torch
from torch import Tensor

from async_flowrl.algorithms.base import LossOutput
from async_flowrl.training.fsdp import World
from async_flowrl.training.messages import GroupMeta, GroupStats
from async_flowrl.types import Span

_NAMES = {"ratio": "ratio/mean"}
"""Names in metrics.jsonl that differ from those of the algorithms."""
_COUNTS = ("kept", "nonzero")


@dataclass
class GroupMetrics:
    """Sums over the rows of one group on this rank; `rows` counts them."""

    meta: GroupMeta
    window_start: int
    sums: dict[str, float]
    rows: int


class UpdateMetrics:
    """Grows group by group; `reduce` adds the ranks up. All ranks must have added the same groups in the same order."""

    def __init__(self) -> None:
        self.groups: list[GroupMetrics] = []
        self.spans: list[Span] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time()
        try:
            yield
        finally:
            self.spans.append(Span(name, start, time()))

    def reduce(self, world: World, device: torch.device) -> None:
        """Replaces this rank's sums by those of all ranks."""
        values = [value for group in self.groups for _, value in sorted(group.sums.items())]
        parts = world.gather(torch.tensor(values, dtype=torch.float64, device=device))
        total = iter(sum(parts[1:], parts[0]).tolist())
        for group in self.groups:
            group.sums = {name: next(total) for name in sorted(group.sums)}
            group.rows *= world.size

    def metrics(self, denominator: int) -> dict[str, float]:
        """Means over all trained rows; `loss` is the one exception: its sum over `denominator`, as it was trained."""
        names = sorted({name for group in self.groups for name in group.sums})
        means = {}
        for name in names:
            having = [group for group in self.groups if name in group.sums]
            total = sum(group.sums[name] for group in having)
            if name == "loss":
                means["loss"] = total / denominator
            elif name not in _COUNTS:
                means[_NAMES.get(name, name)] = total / sum(group.rows for group in having)
        return means

    def kept(self) -> dict[int, tuple[int, int]]:
        """Per age: rows whose gradient survived, rows with a nonzero advantage."""
        by_age: dict[int, tuple[int, int]] = {}
        for group in self.groups:
            kept, nonzero = by_age.get(group.meta.age, (0, 0))
            sums = group.sums
            by_age[group.meta.age] = kept + round(sums.get("kept", 0.0)), nonzero + round(sums.get("nonzero", 0.0))
        return by_age

    def stats(self) -> tuple[GroupStats, ...]:
        return tuple(
            GroupStats(
                group=group.meta.group,
                version=group.meta.version,
                age=group.meta.age,
                window_start=group.window_start,
                rows=group.rows,
                metrics={_NAMES.get(name, name): value / group.rows for name, value in group.sums.items()},
            )
            for group in self.groups
        )


class RowSums:
    """Sums of a group's per-row numbers, kept on the device until the group is done."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._means: dict[str, Tensor] = {}
        self.rows = 0

    def add(self, output: LossOutput) -> None:
        self.rows += len(output.loss)
        rows: Mapping[str, Tensor] = {**output.metrics, "loss": output.loss.detach()}
        for name, values in rows.items():
            if values.shape != output.loss.shape:
                raise ValueError(
                    f"metric {name} must be one number per row {list(output.loss.shape)}, got {list(values.shape)}"
                )
            total = values.detach().double().sum()
            self._sums[name] = self._sums[name] + total if name in self._sums else total

    def set_mean(self, name: str, mean: Tensor | None) -> None:
        """A number known only as a mean: counted as if every row of the group had it."""
        if mean is not None:
            self._means[name] = mean

    def totals(self, other: Tensor) -> tuple[dict[str, float], float]:
        """All of them, and `other`, a float64 number on the same device: one device-to-host copy."""
        sums = self._sums | {name: mean * self.rows for name, mean in self._means.items()}
        names = sorted(sums)
        *values, last = torch.stack([*(sums[name] for name in names), other]).tolist()
        return dict(zip(names, values, strict=True)), last
