"""Statistics of one optimizer step of one rank: float64 sums per part, and what was done when."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import time

import torch
from torch import Tensor

from async_flowrl.algorithms.base import LossOutput
from async_flowrl.training.messages import GAP, PartStats
from async_flowrl.types import Span

LOSS, SQUARED, GRADIENT = "loss", "gradient, squared", "gradient"
"""Numbers of a part beside what it reported: its loss, its gradient's squared norm and largest magnitude."""
_OWN = (LOSS, SQUARED, GRADIENT, GAP)


class UpdateMetrics:
    """Grows part by part."""

    def __init__(self) -> None:
        self.parts: list[PartStats] = []
        self.spans: list[Span] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = time()
        try:
            yield
        finally:
            self.spans.append(Span(name, start, time()))


class PartSums:
    """Sums of a part's per-row numbers, kept on the device until its group is done."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self.rows = 0

    def add(self, output: LossOutput) -> None:
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
        """A number known only as a mean: counted as if every row had it. Call it after the last `add`."""
        if mean is not None:
            self._sums[name] = mean * self.rows

    def set(self, name: str, value: Tensor) -> None:
        """A number of the part as a whole."""
        self._sums[name] = value.double()


def on_host(parts: Sequence[PartSums]) -> list[dict[str, float]]:
    """The numbers of each part: one device-to-host copy for all of them."""
    names = [sorted(part._sums) for part in parts]
    numbers = [part._sums[name] for part, own in zip(parts, names, strict=True) for name in own]
    values = iter(torch.stack(numbers).tolist() if numbers else ())
    return [{name: next(values) for name in own} for own in names]
