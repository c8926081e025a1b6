"""Padding of texts of different lengths to one batch, with the mask that a network needs then."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def padded_texts(branches: Sequence[Mapping[str, Tensor]], n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Returns padded embeddings [len(branches) · n, L, D] in `dtype` and their mask, bool [len(branches) · n, L].

    Each branch has "prompt_embeds" [l, D] of one text, which is repeated `n` times; L is the largest of the lengths l.

    The mask is None if no branch needs padding.
    """
    embeds = [branch["prompt_embeds"].to(dtype) for branch in branches]
    lengths = [len(e) for e in embeds]
    longest = max(lengths)
    padded = [torch.nn.functional.pad(e, (0, 0, 0, longest - len(e))).expand(n, -1, -1) for e in embeds]
    if min(lengths) == longest:
        return torch.cat(padded), None
    positions = torch.arange(longest, device=embeds[0].device)
    mask = torch.cat([(positions < length).expand(n, -1) for length in lengths])
    return torch.cat(padded), mask
