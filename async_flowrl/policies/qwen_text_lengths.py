"""Replacement of a function of diffusers' Qwen-Image for which the host waits in every denoising step."""

import sys
from typing import Any, cast

import torch
from torch import Tensor

_NETWORK = "diffusers.models.transformers.transformer_qwenimage"
"""Module of diffusers' network, which whoever has a network to train or to sample with has imported."""


def skip_unused_lengths() -> None:
    """Puts `text_length` in the place of diffusers' function, for this process.

    Does nothing where diffusers' network was not imported, as in the driver, which asks a policy for shapes only.
    """
    if (network := sys.modules.get(_NETWORK)) is not None:
        cast("Any", network).compute_text_seq_len_from_mask = text_length


def text_length(texts: Tensor, mask: Tensor | None) -> tuple[int, None, Tensor | None]:
    """Returns the padded length of `texts` [n, L, D], None, and the mask as bool.

    diffusers' function also computes the length of each text, which its network does not use, and for that copies a
    number to the device. The host waits for that copy in every denoising step of a batch whose prompts differ in
    length. Raises ValueError for a mask of another shape than [n, L].
    """
    if mask is not None and mask.shape != texts.shape[:2]:
        raise ValueError(f"the mask {tuple(mask.shape)} does not fit texts {tuple(texts.shape)}")
    return texts.shape[1], None, None if mask is None else mask.to(torch.bool)
