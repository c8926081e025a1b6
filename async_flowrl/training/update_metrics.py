"""Statistics of one optimizer step on one rank: float64 sums per part of a group, and time spans."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import time

import torch
from torch import Tensor

from async_flowrl.algorithms.base import LossOutput
from async_flowrl.training.messages import GAP, PartStats
from async_flowrl.types import Span

LOSS, SQUARED, GRADIENT = "loss", "gradient, squared", "gradient"
"""Names of the trainer's own numbers of a part: loss, squared norm and largest magnitude of its gradient."""
_OWN = (LOSS, SQUARED, GRADIENT, GAP)


class UpdateMetrics:
    """The statistics collected so far in an optimizer step."""

    def __init__(self) -> None:
        self.parts: list[PartStats] = []
        self.spans: list[Span] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Context manager: appends a span for the time inside."""
        start = time()
        try:
            yield
        finally:
            self.spans.append(Span(name, start, time()))


class PartSums:
    """Sums of a part's numbers per row; they stay on the device until `on_host`."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self.rows = 0

    def add(self, output: LossOutput) -> None:
        """Adds loss and metrics of a micro-batch. ValueError for a reserved name or a metric not per row."""
        self.rows += len(output.loss)
        if taken := [name for name in output.metrics if name in _OWN]:
            raise ValueError(
                f"the algorithm reports a metric named {taken[0]!r}, which the trainer itself reports: give it another "
                f"name than {', '.join(map(repr, _OWN))}"
            )
        rows: Mapping[str, Tensor] = {**output.metrics, LOSS: output.loss.detach()}
        for name, values in rows.items():
            if values.shape != output.loss.shape:
                raise ValueError(
                    f"metric {name} must be one number per row {list(output.loss.shape)}, got {list(values.shape)}"
                )
            total = values.detach().double().sum()
            self._sums[name] = self._sums[name] + total if name in self._sums else total

    def set_mean(self, name: str, mean: Tensor | None) -> None:
        """Sets a number of which only the mean is known, as if every row had it. Call it after the last `add`."""
        if mean is not None:
            self._sums[name] = mean * self.rows

    def set(self, name: str, value: Tensor) -> None:
        """Sets a number of the whole part."""
        self._sums[name] = value.double()


def on_host(parts: Sequence[PartSums]) -> list[dict[str, float]]:
    """Returns the numbers of each part by name, with a single copy from the device for all of them."""
    names = [sorted(part._sums) for part in parts]
    numbers = [part._sums[name] for part, own in zip(parts, names, strict=True) for name in own]
    values = iter(torch.stack(numbers).tolist() if numbers else ())
    return [{name: next(values) for name in own} for own in names]
