"""Rows of the comparison: the tolerances, and the largest difference of tensors."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

EMBEDDINGS, SCHEDULE, VELOCITY, LATENTS = "prompt embeddings", "schedule", "velocity", "ODE latents"
DECODE, BATCH, LORA = "decoded images", "noise levels in one batch", "LoRA round trip"
CAUSES = {
    EMBEDDINGS: "the stock pipeline may add an instruction or a template, pad to another length, or give a mask",
    SCHEDULE: "_set_schedule spaces or shifts otherwise than its __call__ does",
    VELOCITY: "_network or _guide is not what the stock pipeline does: the sign, the unit of time, or guidance",
    LATENTS: "the stock pipeline may step with another scheduler than FlowMatchEulerDiscreteScheduler",
    DECODE: "_decoded or _unpacked scales, shifts or unpacks the latents otherwise than its __call__",
    BATCH: "rows at different noise levels in one batch, as the trainer has them, give other velocities than alone",
    LORA: "layers that the stock pipeline does not adapt, or another scale",
}
"""Name of a step, in order → the usual cause of a difference."""
STEPS = tuple(CAUSES)
IMAGES = 2
"""Images per comparison; with a single one, mixed-up rows of a batch would not be seen."""


@dataclass(frozen=True)
class Tolerance:
    """Largest differences that rounding may explain.

    `relative` is to the largest value of diffusers' own ("stock") pipeline; `levels` counts pixel levels of 0..255.
    """

    relative: float
    levels: int


TOLERANCES = {"float32": Tolerance(1e-4, 1), "bfloat16": Tolerance(1e-1, 4)}
"""Tolerance by the dtype of the model."""


@dataclass(frozen=True)
class Row:
    """Result of one step: the largest absolute difference, and the same `relative` to the largest stock value.

    Both are None if nothing was measured. `said` is what differs, with the usual cause.
    """

    step: str
    holds: bool
    difference: float | None = None
    relative: float | None = None
    said: str = ""


def gap(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Returns the largest difference of two tensors of one shape, absolute and relative to the largest of `theirs`.

    Both are infinite if one of the tensors has a value that is not finite.
    """
    one, other = ours.detach().double().cpu(), theirs.detach().double().cpu()
    if not one.numel():
        return 0.0, 0.0
    if not torch.isfinite(one).all() or not torch.isfinite(other).all():
        return float("inf"), float("inf")
    difference = float((one - other).abs().max())
    return difference, difference / max(float(other.abs().max()), 1e-12)


def row_of(
    step: str,
    pairs: Iterable[tuple[Tensor, Tensor]],
    *,
    relative: float = float("inf"),
    absolute: float = float("inf"),
) -> Row:
    """Returns the row of a step from pairs of the family's tensor and the stock pipeline's, in order."""
    gaps, first = [(0.0, 0.0)], None
    for number, (ours, theirs) in enumerate(pairs):
        if ours.shape != theirs.shape:
            shapes = f"the family's shape is {list(ours.shape)}, the stock pipeline's {list(theirs.shape)}"
            return Row(step, False, said=f"{shapes}: {CAUSES[step]}")
        gaps.append(gap(ours, theirs))
        if first is None and (gaps[-1][0] > absolute or gaps[-1][1] > relative):
            first = number
    largest = max(gaps, key=lambda each: each[1])
    said = "" if first is None else f"by {gaps[first + 1][0]:.2g} at number {first}: {CAUSES[step]}"
    return Row(step, first is None, *largest, said)
