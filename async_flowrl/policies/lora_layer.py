"""The layer of a LoRA, for y = Wx + (alpha / rank) · B(Ax) (arXiv 2106.09685, section 4.1).

Modules and names are PEFT's, which would cast x to float32. `LoraLinear` computes in the dtype of W, with A and B cast
to it, and adds B(Ax) to Wx inside one matrix product.
"""

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from async_flowrl.policies.quantized_layer import QuantizedLinear

ADAPTER = "default"


def compute_copies(layer: nn.Module, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, float]:
    """Returns (A [rank, in], B [out, rank], alpha / rank) with A and B in `dtype`, by default that of the base weights.

    If the parameters already have that dtype, they are returned themselves, without a copy.
    """
    live: Any = layer
    dtype = dtype or compute_dtype(layer)
    # `nn.Module`'s attribute lookup takes as long as the matrix product of a small layer.
    a, b = (live._modules[part]._modules[ADAPTER]._parameters["weight"] for part in ("lora_A", "lora_B"))
    return a.to(dtype), b.to(dtype), float(live.scaling[ADAPTER])


def compute_dtype(layer: nn.Module) -> torch.dtype:
    base = cast("Any", layer).get_base_layer()
    return cast("torch.dtype", (base.scale if isinstance(base, QuantizedLinear) else base.weight).dtype)


@cache
def lora_linear() -> type[nn.Module]:
    """Returns the class of the layer; PEFT takes seconds to import, which a process without a LoRA does not need."""
    from peft.tuners.lora import Linear

    class LoraLinear(Linear):  # type: ignore[misc]
        """A linear layer with the PEFT adapter `default`; other adapters of the layer have no effect."""

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            """Returns y [..., out] for x [..., in], in the base layer's dtype."""
            base: Tensor = self.base_layer(x)
            if self.disable_adapters:
                return base
            a, b, scaling = compute_copies(self, base.dtype)
            flat, hidden = base.flatten(0, -2), nn.functional.linear(x, a).flatten(0, -2)
            # Without a graph, nobody else has Wx, and the sum may take its memory; the bits are the same.
            out = torch.addmm(flat, hidden, b.t(), alpha=scaling, out=None if torch.is_grad_enabled() else flat)
            return out.view(base.shape)

    return LoraLinear
