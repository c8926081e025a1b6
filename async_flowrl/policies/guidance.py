"""Formulas of classifier-free guidance, which combines two predictions of a network."""

import torch
from torch import Tensor


def guided_velocity(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Returns u + w (c - u) for velocities c (`conditional`) and u (`unconditional`), all [n, ...] of one dtype.

    `scale` is w, as diffusers' `true_cfg_scale`; 1 gives c up to rounding. Classifier-free guidance, arXiv 2207.12598.
    """
    return unconditional + scale * (conditional - unconditional)


def with_norm_of(conditional: Tensor, guided: Tensor) -> Tensor:
    """Returns `guided` [..., channels], each token scaled to the norm that it has in `conditional`.

    QwenImagePipeline does the same, but gives NaN for a token of zeros in `guided`; here it stays zero.
    """
    norm: Tensor = guided.norm(dim=-1, keepdim=True)
    rescale: Tensor = conditional.norm(dim=-1, keepdim=True) / torch.where(norm > 0, norm, 1.0)
    return guided * rescale
