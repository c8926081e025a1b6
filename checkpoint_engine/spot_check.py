"""Comparison of a few elements of every live tensor with the bytes that were staged of them.

It finds bytes of an older version and bytes that changed while they were copied, which no digest shows: a digest covers
what was staged.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from checkpoint_engine.errors import WeightsMismatch
from checkpoint_engine.layout import Layout, dtype_of
from checkpoint_engine.together import Together

MAX_SAMPLES_PER_TENSOR = 16
"""Largest number of elements per tensor that are compared."""
MAX_CACHED_LAYOUTS = 16
"""Largest number of layouts for which it is remembered which elements these are."""


def sample(layout: Layout, sources: Sequence[Tensor], together: Together | None = None) -> Tensor:
    """Returns a few elements of every tensor, in layout order and the dtype that is sent, on the tensors' device.

    `together` are the same tensors as one, if they lie so; then they are read by one operation instead of one for each.
    """
    if together is not None and (sent := _only_dtype(layout)) is not None:
        places = torch.from_numpy(_places(layout, together.offsets))
        return together.elements.index_select(0, places).to(sent)
    picked = []
    for (count, step, dtype), source in zip(_samplings(layout), sources, strict=True):
        flat = source if source.is_contiguous() else source.contiguous()
        few = flat.as_strided((count,), (step,))
        picked.append(few if few.dtype is dtype else few.to(dtype))
    return torch.cat(picked)


def check_sample(layout: Layout, title: str, expected: Tensor, views: Sequence[Tensor]) -> None:
    """Raises WeightsMismatch if the sample of the staged tensors differs from the live tensors' sample.

    `expected` is in host memory, `views` on any device in layout order; the error names `title` and the tensor.
    """
    staged = sample(layout, views, Together.of(views)).cpu()
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


@lru_cache(MAX_CACHED_LAYOUTS)
def _places(layout: Layout, offsets: tuple[int, ...]) -> NDArray[np.int64]:
    """Returns the elements [n] that are compared, of tensors that begin at these elements of one storage.

    It is no tensor, because one that is made while a plan is rehearsed on shapes alone would have no content.
    """
    parts = zip(_samplings(layout), offsets, strict=True)
    return np.concatenate([offset + step * np.arange(count, dtype=np.int64) for (count, step, _), offset in parts])


@lru_cache(MAX_CACHED_LAYOUTS)
def _only_dtype(layout: Layout) -> torch.dtype | None:
    """Returns the dtype in which all tensors are sent; None if there are several."""
    dtypes = {dtype for _, _, dtype in _samplings(layout)}
    return dtypes.pop() if len(dtypes) == 1 else None


@lru_cache(MAX_CACHED_LAYOUTS)
def _samplings(layout: Layout) -> tuple[tuple[int, int, torch.dtype], ...]:
    """Returns by tensor the number of elements that are compared, their distance in elements, and the dtype sent."""
    samplings = []
    for entry in layout.entries:
        numel = math.prod(entry.shape)
        count = min(MAX_SAMPLES_PER_TENSOR, numel)
        samplings.append((count, max(1, numel // max(1, count)), dtype_of(entry)))
    return tuple(samplings)
