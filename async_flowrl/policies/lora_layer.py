"""The LoRA layer of rollout and trainer: PEFT's modules and names, with a faster forward pass.

LoRA (arXiv 2106.09685, section 4.1) computes y = Wx + (alpha / rank) · B(Ax). PEFT's layer casts x to float32 and needs
four more passes over the activations. This layer computes in the dtype of W, with A and B cast to it (the trainer keeps
them in float32), and adds B(Ax) to Wx inside one matrix product.
"""

from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear
from torch import Tensor, nn

ADAPTER = "default"
"""Name of the PEFT adapter that a run trains."""


class LoraLinear(Linear):  # type: ignore[misc]
    """A linear layer with the PEFT adapter `default`; other adapters of the layer have no effect."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Returns y [..., out] for x [..., in], in the base layer's dtype."""
        base: Tensor = self.base_layer(x)
        if self.disable_adapters:
            return base
        a, b, scaling = _copies(self, base.dtype)
        flat, hidden = base.flatten(0, -2), nn.functional.linear(x, a).flatten(0, -2)
        # Without a graph, nobody else has Wx, and the sum may take its memory; the bits are the same.
        out = torch.addmm(flat, hidden, b.t(), alpha=scaling, out=None if torch.is_grad_enabled() else flat)
        return out.view(base.shape)


def compute_copies(layer: nn.Module) -> tuple[Tensor, Tensor, float]:
    """Returns (A [rank, in], B [out, rank], alpha / rank) with A and B in the dtype of the layer's base weights.

    If the parameters already have that dtype, they are returned themselves, without a copy.
    """
    return _copies(layer, compute_dtype(layer))


def _copies(layer: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
    live: Any = layer
    # `nn.Module`'s attribute lookup takes as long as the matrix product of a small layer.
    a, b = (live._modules[part]._modules[ADAPTER]._parameters["weight"] for part in ("lora_A", "lora_B"))
    return a.to(dtype), b.to(dtype), float(live.scaling[ADAPTER])


def compute_dtype(layer: nn.Module) -> torch.dtype:
    """Returns the dtype of a layer's base weights."""
    live: Any = layer
    dtype: torch.dtype = live.get_base_layer().weight.dtype
    return dtype


def peft_config(rank: int, alpha: float, targets: list[str]) -> LoraConfig:
    """Returns a PEFT configuration that makes `LoraLinear` of the linear layers named in `targets`."""
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0, bias="none")
    config._register_custom_module({nn.Linear: LoraLinear})  # documented under PEFT's "custom models"
    return config
