"""Classifier-free guidance, which combines two predictions of a network: its formulas, and when it takes two passes."""

from collections.abc import Mapping

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


def apart(positive: Mapping[str, Tensor], negative: Mapping[str, Tensor], device: torch.device) -> bool:
    """Returns True if guidance needs two forward passes: on CUDA, for prompts of different lengths.

    In one batch the shorter text would be padded and masked, and a mask prevents flash attention. Padding does not
    change text positions, so the results are mathematically equal. On a CPU one batch costs no speed.
    """
    return device.type == "cuda" and any(positive[name].shape != negative[name].shape for name in positive)
