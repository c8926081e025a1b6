"""Classifier-free guidance, the formulas alone: what the two predictions of a network make together."""

import torch
from torch import Tensor


def guided_velocity(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """u + w (c - u), of the shape and dtype of both velocities [n, ...]; classifier-free guidance (arXiv 2207.12598).

    `scale` is w as in diffusers' `true_cfg_scale`: 1 gives the conditional velocity, up to rounding.
    """
    return unconditional + scale * (conditional - unconditional)


def with_norm_of(conditional: Tensor, guided: Tensor) -> Tensor:
    """`guided` [..., channels] with each token's norm set to that of `conditional`, as QwenImagePipeline does it.

    A token that is all zeros after guidance has no direction to scale: it stays zero, where the pipeline has NaN.
    """
    norm: Tensor = guided.norm(dim=-1, keepdim=True)
    rescale: Tensor = conditional.norm(dim=-1, keepdim=True) / torch.where(norm > 0, norm, 1.0)
    return guided * rescale
