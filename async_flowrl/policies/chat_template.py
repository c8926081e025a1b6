"""The chat template around a prompt: its system prompt, and prompts that come as token ids of the whole template.

Written for pipelines like QwenImagePipeline, which encode their template with the prompt in it and drop the embeddings
of its first `prompt_template_encode_start_idx` tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from async_flowrl.types import Prompt, TokenIds


@contextmanager
def system_prompt(pipeline: Any, system: str | None) -> Iterator[None]:
    """Inside, the pipeline's prompt template carries `system` in place of its own system prompt; None leaves it.

    The pipeline drops as many tokens of the encoded text as the template has before the user's words.
    """
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
    """Embeddings [L, D], bit for bit those that the pipeline's own encoding gives of the text with these ids."""
    encoder, start = pipeline.text_encoder, pipeline.prompt_template_encode_start_idx
    tokens = torch.tensor([ids[: pipeline.tokenizer_max_length + start]], device=encoder.device)
    output = encoder(input_ids=tokens, attention_mask=torch.ones_like(tokens), output_hidden_states=True)
    return cast("Tensor", output.hidden_states[-1][0, start:])


def check_ids(pipeline: Any, prompts: Sequence[Prompt], vocabulary: int) -> None:
    """Raises ValueError, one sentence, for ids that are no prompt of the pipeline (of which its tokenizer is used).

    They must lie below `vocabulary`, begin as the template with the prompt's system prompt does, and go on after that.
    """
    for prompt in prompts:
        given = (
            ("token ids", prompt.token_ids, prompt.system),
            ("negative token ids", prompt.negative_token_ids, None),
        )
        for name, ids, system in given:
            if ids is None:
                continue
            where = f"{name} of prompt {prompt.index} ({prompt.text!r:.60})"
            if max(ids) >= vocabulary:
                raise ValueError(f"{where}: {max(ids)} is not in the text encoder's vocabulary of {vocabulary}")
            start = _template_start(pipeline, system)
            # The last one may be another where the text goes on with blanks: they share a token.
            if list(ids[: len(start) - 1]) != start[:-1] or len(ids) <= len(start):
                raise ValueError(
                    f"{where} must be those of the model's whole prompt template, which begins with {start}, "
                    f"got {len(ids)} that begin with {list(ids[: len(start)])}"
                )


def _template_start(pipeline: Any, system: str | None) -> list[int]:
    """Token ids of the template before the user's words."""
    with system_prompt(pipeline, system):
        before = pipeline.prompt_template_encode.format("\0").split("\0")[0]
    return cast("list[int]", pipeline.tokenizer(before).input_ids)
