"""The layer of a LoRA, for y = Wx + (alpha / rank) · B(Ax) (arXiv 2106.09685, section 4.1).

Modules and names are PEFT's, which would cast x to float32 and pass over the activations four times more. `LoraLinear`
computes in the dtype of W, with A and B cast to it (the trainer keeps them in float32), and adds B(Ax) to Wx inside one
matrix product.
"""

from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn

from async_flowrl.policies.lora import compute_copies


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
