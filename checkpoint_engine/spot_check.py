"""Comparison of a few elements of every live tensor with the bytes that were staged of them.

It finds bytes of an older version and bytes that changed while they were copied, which no digest shows: a digest covers
what was staged.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from checkpoint_engine.errors import WeightsMismatch
from checkpoint_engine.layout import Entry, Layout, dtype_of

MAX_SAMPLES_PER_TENSOR = 16
"""Largest number of elements per tensor that are compared."""


def sample(layout: Layout, sources: Sequence[Tensor]) -> Tensor:
    """Returns a few elements of every tensor, in layout order and the dtype that is sent, on the tensors' device."""
    picked = []
    for entry, source in zip(layout.entries, sources, strict=True):
        flat = source if source.is_contiguous() else source.contiguous()
        count, step = _sampling(entry)
        picked.append(flat.as_strided((count,), (step,)).to(dtype_of(entry)))
    return torch.cat(picked)


def check_sample(layout: Layout, title: str, expected: Tensor, data: Tensor) -> None:
    """Raises WeightsMismatch if the sample of the bytes uint8 [nbytes] differs from the live tensors' sample.

    `expected` is in host memory, `data` on any device; the error names `title` and the tensor.
    """
    staged = sample(layout, list(layout.views(data).values())).cpu()
    if torch.equal(staged.view(torch.uint8), expected.view(torch.uint8)):
        return
    start = 0
    for entry in layout.entries:
        end = start + _sampling(entry)[0]
        if not torch.equal(staged[start:end].view(torch.uint8), expected[start:end].view(torch.uint8)):
            raise WeightsMismatch(
                f"the staged bytes of {title} are not the trainer's: "
                f"{entry.name} begins {staged[start].item():.6g}, was {expected[start].item():.6g}"
            )
        start = end


def _sampling(entry: Entry) -> tuple[int, int]:
    """Returns the number of a tensor's elements that are compared, and their distance in elements."""
    numel = math.prod(entry.shape)
    count = min(MAX_SAMPLES_PER_TENSOR, numel)
    return count, max(1, numel // max(1, count))
