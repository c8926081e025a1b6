"""A row of the comparison, and how two arrays are compared."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """What rounding alone may explain: relative to the largest value, in levels of 255, and in nats per element."""

    relative: float
    levels: int
    nats: float


TOLERANCES = {"float32": Tolerance(1e-4, 1, 1e-5), "bfloat16": Tolerance(1e-1, 4, 1e-2)}


@dataclass(frozen=True)
class Row:
    """One step of the comparison. `difference` is the largest one, `relative` to the largest stock value; None where
    there is nothing to measure. `said` is what differs and the likely cause, or what was compared."""

    step: str
    holds: bool
    difference: float | None = None
    relative: float | None = None
    said: str = ""


@dataclass(frozen=True)
class Gap:
    difference: float
    relative: float


def gap(ours: Tensor, theirs: Tensor) -> Gap:
    """The largest absolute difference of two arrays of one shape; infinite where either is not finite."""
    one, other = ours.detach().double().cpu(), theirs.detach().double().cpu()
    if not one.numel():
        return Gap(0.0, 0.0)
    if not torch.isfinite(one).all() or not torch.isfinite(other).all():
        return Gap(float("inf"), float("inf"))
    difference = float((one - other).abs().max())
    return Gap(difference, difference / max(float(other.abs().max()), 1e-12))
