"""Comparison of a few elements of every live tensor with the bytes that were staged of them.

It finds bytes of an older version and bytes that changed while they were copied, which no digest shows.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from checkpoint_engine.errors import WeightsMismatch
from checkpoint_engine.layout import Layout, dtype_of

MAX_SAMPLES_PER_TENSOR = 16  # Largest number of elements per tensor that are compared.


def sample(layout: Layout, sources: Sequence[Tensor]) -> Tensor:
    """Returns a few elements of every tensor, in layout order and the dtype that is sent, on the tensors' device."""
    picked = []
    for (count, step, dtype), source in zip(_samplings(layout), sources, strict=True):
        flat = source if source.is_contiguous() else source.contiguous()
        few = flat.as_strided((count,), (step,))
        picked.append(few if few.dtype is dtype else few.to(dtype))
    return torch.cat(picked)


def check_sample(layout: Layout, title: str, expected: Tensor, views: Sequence[Tensor]) -> None:
    """Raises WeightsMismatch if the sample of staged `views` is not `expected`; names `title` and the tensor."""
    staged = sample(layout, views).cpu()
    if torch.equal(staged.view(torch.uint8), expected.view(torch.uint8)):
        return
    start = 0
    for entry, (count, _, _) in zip(layout.entries, _samplings(layout), strict=True):
        end = start + count
        if not torch.equal(staged[start:end].view(torch.uint8), expected[start:end].view(torch.uint8)):
            raise WeightsMismatch(
                f"the staged bytes of {title} are not the trainer's: "
                f"{entry.name} begins {staged[start].item():.6g}, was {expected[start].item():.6g}"
            )
        start = end


@lru_cache(16)
def _samplings(layout: Layout) -> tuple[tuple[int, int, torch.dtype], ...]:
    """Returns by tensor the number of elements that are compared, their distance in elements, and the dtype sent."""
    samplings = []
    for entry in layout.entries:
        numel = math.prod(entry.shape)
        count = min(MAX_SAMPLES_PER_TENSOR, numel)
        samplings.append((count, max(1, numel // max(1, count)), dtype_of(entry)))
    return tuple(samplings)
