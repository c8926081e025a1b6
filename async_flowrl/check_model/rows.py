"""Row of the comparison, its tolerances, and the difference of two tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """Largest differences that rounding may explain.

    `relative` is to the largest value of diffusers' own ("stock") pipeline, `levels` counts pixel levels of 0..255, and
    `nats` is for log-probabilities, per latent element.
    """

    relative: float
    levels: int
    nats: float


TOLERANCES = {"float32": Tolerance(1e-4, 1, 1e-5), "bfloat16": Tolerance(1e-1, 4, 1e-2)}
"""Tolerance by the dtype of the model."""


@dataclass(frozen=True)
class Row:
    """Result of one step: the largest absolute difference, and the same `relative` to the largest stock value.

    Both are None if nothing was measured. `said` is the likely cause of a difference, or what was compared.
    """

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
    """Returns the largest difference of two tensors of one shape, infinite if one of them has a non-finite value."""
    one, other = ours.detach().double().cpu(), theirs.detach().double().cpu()
    if not one.numel():
        return Gap(0.0, 0.0)
    if not torch.isfinite(one).all() or not torch.isfinite(other).all():
        return Gap(float("inf"), float("inf"))
    difference = float((one - other).abs().max())
    return Gap(difference, difference / max(float(other.abs().max()), 1e-12))
