"""The texts of Qwen-Image: the chat template around a prompt, and padding to one batch.

The pipeline encodes the whole template and drops its first `prompt_template_encode_start_idx` embeddings. Its system
prompt can be replaced; token ids of a prompt are those of the whole template.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from async_flowrl.types import Prompt, TokenIds


def padded_texts(branches: Sequence[Mapping[str, Tensor]], n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Returns padded embeddings [len(branches) · n, L, D] in `dtype` and their mask, bool [len(branches) · n, L].

    Each branch has "prompt_embeds" [l, D] of one text, which is repeated `n` times; L is the largest l. The mask is
    None if no branch needs padding.
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


@contextmanager
def system_prompt(pipeline: Any, system: str | None) -> Iterator[None]:
    """Context manager: replaces the system prompt in the pipeline's template by `system`; None changes nothing."""
    # It also sets the number of tokens before the prompt, whose embeddings the pipeline drops.
    kept = pipeline.prompt_template_encode, pipeline.prompt_template_encode_start_idx
    if system is not None:
        before, rest = kept[0].split("system\n", 1)
        after = rest[rest.index("<|im_end|>") :]
        prefix = before + "system\n" + system + after.split("{}")[0]
        pipeline.prompt_template_encode = f"{before}system\n{system.replace('{', '{{').replace('}', '}}')}{after}"
        pipeline.prompt_template_encode_start_idx = len(pipeline.tokenizer(prefix).input_ids)
    try:
        yield
    finally:
        pipeline.prompt_template_encode, pipeline.prompt_template_encode_start_idx = kept


def encode_ids(pipeline: Any, ids: TokenIds) -> Tensor:
    """Returns embeddings [L, D] of token ids, equal bit for bit to the pipeline's encoding of the same text."""
    encoder, start = pipeline.text_encoder, pipeline.prompt_template_encode_start_idx
    tokens = torch.tensor([ids[: pipeline.tokenizer_max_length + start]], device=encoder.device)
    output = encoder(input_ids=tokens, attention_mask=torch.ones_like(tokens), output_hidden_states=True)
    return cast("Tensor", output.hidden_states[-1][0, start:])


def bare_pipeline(tokenizer: Any) -> Any:
    from diffusers import QwenImagePipeline

    return QwenImagePipeline(scheduler=None, vae=None, text_encoder=None, tokenizer=tokenizer, transformer=None)


def check_ids(pipeline: Any, prompts: Sequence[Prompt], vocabulary: int) -> None:
    """Raises ValueError, one sentence, for token ids that are not a prompt in the pipeline's template.

    Each id must be below `vocabulary`. The ids must begin with those of the template (with the prompt's system prompt)
    and have more after them. Of the pipeline only the tokenizer and the template are used.
    """
    for prompt in prompts:
        negative = ("negative token ids", prompt.negative_token_ids, None)
        for name, ids, system in (("token ids", prompt.token_ids, prompt.system), negative):
            if ids is None:
                continue
            where = f"{name} of prompt {prompt.index} ({prompt.text!r:.60})"
            if max(ids) >= vocabulary:
                raise ValueError(f"{where}: {max(ids)} is not in the text encoder's vocabulary of {vocabulary}")
            start = _template_start(pipeline, system)
            # The last id may differ, because a prompt that begins with blanks shares a token with the template.
            if list(ids[: len(start) - 1]) != start[:-1] or len(ids) <= len(start):
                raise ValueError(
                    f"{where} must be those of the model's whole prompt template, which begins with {start}, "
                    f"got {len(ids)} that begin with {list(ids[: len(start)])}"
                )


def _template_start(pipeline: Any, system: str | None) -> list[int]:
    with system_prompt(pipeline, system):
        before = pipeline.prompt_template_encode.format("\0").split("\0")[0]
    return cast("list[int]", pipeline.tokenizer(before).input_ids)


# diffusers' module of the network, which has been imported where there is a network to train or to sample with.
_NETWORK = "diffusers.models.transformers.transformer_qwenimage"


def skip_unused_lengths() -> None:
    """Puts `text_length` in the place of diffusers' function, for this process, if diffusers' network was imported."""
    if (network := sys.modules.get(_NETWORK)) is not None:
        cast("Any", network).compute_text_seq_len_from_mask = text_length


def text_length(texts: Tensor, mask: Tensor | None) -> tuple[int, None, Tensor | None]:
    """Returns the padded length of `texts` [n, L, D], None, and the mask as bool. Raises ValueError."""
    # diffusers' function also computes the length of each text, which its network does not use, and for that copies a
    # number to the device, for which the host waits in every denoising step of a batch whose prompts differ in length.
    if mask is not None and mask.shape != texts.shape[:2]:
        raise ValueError(f"the mask {tuple(mask.shape)} does not fit texts {tuple(texts.shape)}")
    return texts.shape[1], None, None if mask is None else mask.to(torch.bool)
