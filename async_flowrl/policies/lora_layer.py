"""The LoRA layer that rollout and trainer both compute with: PEFT's modules and names, one formula of our own.

LoRA (arXiv 2106.09685, section 4.1): y = Wx + (alpha / rank) · B(Ax). PEFT's layer casts x to the adapter's float32 and
computes, scales, adds and casts back in four more passes over the activations. This one computes in the base layer's
dtype, with A and B cast to it (their masters stay float32), and adds B(Ax) to Wx inside one matrix product.
"""

from typing import Any

import peft
import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn

ADAPTER = "default"


class LoraLinear(Linear):  # type: ignore[misc]
    """A linear layer with the adapter `default`; other adapters of the same layer are never computed."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[..., in] → [..., out], in the base layer's dtype."""
        base: Tensor = self.base_layer(x)
        if self.disable_adapters:
            return base
        a, b, scaling = compute_copies(self)
        hidden = nn.functional.linear(x, a)
        out = torch.addmm(base.flatten(0, -2), hidden.flatten(0, -2), b.t(), alpha=scaling)
        return out.view(base.shape)


def compute_copies(layer: nn.Module) -> tuple[Tensor, Tensor, float]:
    """(A [rank, in], B [out, rank], scaling) as a layer computes with them: in the dtype of its base weights.

    They are the parameters themselves where these have that dtype already.
    """
    live: Any = layer
    dtype = compute_dtype(layer)
    # Looked up in the modules' own dictionaries: `nn.Module`'s attributes cost a small layer as much as its product.
    a, b = (live._modules[part]._modules[ADAPTER]._parameters["weight"] for part in ("lora_A", "lora_B"))
    return a.to(dtype), b.to(dtype), float(live.scaling[ADAPTER])


def compute_dtype(layer: nn.Module) -> torch.dtype:
    """The dtype of a layer's base weights."""
    live: Any = layer
    dtype: torch.dtype = live.get_base_layer().weight.dtype
    return dtype


def peft_config(rank: int, alpha: float, targets: list[str]) -> peft.LoraConfig:
    """PEFT's configuration of an adapter made of `LoraLinear`."""
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, lora_dropout=0.0, bias="none")
    config._register_custom_module({nn.Linear: LoraLinear})  # documented under PEFT's "custom models"
    return config
