"""Attention that takes the memory of a fused kernel, on devices without such a kernel."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn


@contextmanager
def fused_attention() -> Iterator[None]:
    """Context in which attention takes the memory of a fused kernel, O(tokens), on devices without such a kernel.

    The output has the right shape but is zero, and so are the gradients.
    """
    own = nn.functional.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        return cast("Tensor", _FusedShapes.apply(query, key, value))  # type: ignore[no-untyped-call]

    nn.functional.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = own


class _FusedShapes(torch.autograd.Function):
    """Attention by shapes alone; keeps inputs, output and a float32 number per row for the backward pass."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.zeros_like(query)
        rows = query.new_zeros(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, rows)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
