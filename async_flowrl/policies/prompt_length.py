"""Prompts of which a family's text encoder reads only the beginning: diffusers cuts longer ones without a word."""

import logging
from collections.abc import Iterable, Iterator

from async_flowrl.policies.pipeline_family import PipelineFamily
from async_flowrl.policies.registry import ResolvedModel, load_family
from async_flowrl.types import Prompt

logger = logging.getLogger(__name__)

MARGIN = 16
"""Tokens that a template and the tokenizer may add to a prompt. A text never has more tokens than bytes, so a text of
fewer bytes than the limit less these is not tokenised."""


def cut_prompts(model: ResolvedModel, prompts: Iterable[Prompt]) -> Iterator[tuple[Prompt, int]]:
    """Yields each prompt that is cut, with the number of its characters that the text encoder reads.

    Prompts of token ids, and families of your own without the tokenizer of a diffusers folder, are left out. If the
    tokenizer cannot be read, that is logged as a warning.
    """
    family, tokenizer = load_family(model.family), None
    if not isinstance(family, PipelineFamily):
        return
    limit = model.max_sequence_length or family.text_tokens
    for prompt in prompts:
        if not isinstance(prompt.wording, str) or len(prompt.text.encode()) < limit - MARGIN:
            continue
        if tokenizer is None:
            from transformers import AutoTokenizer

            try:
                tokenizer = AutoTokenizer.from_pretrained(
                    model.path, subfolder=family.tokenizer, revision=model.revision
                )
            except (OSError, ValueError) as error:
                logger.warning("whether prompts are longer than the text encoder reads is not known: %s", error)
                return
        text, start, kept = family.framed(tokenizer, prompt.text, limit)
        places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        if len(places) > kept and (read := places[kept - 1][1] - start) < len(prompt.text.rstrip()):
            yield prompt, max(0, read)


def check_lengths(model: ResolvedModel, prompts: Iterable[Prompt]) -> int:
    """Returns the number of prompts that are cut.

    Raises ValueError for one whose target stands in the part that the text encoder does not read.
    """
    count = 0
    for prompt, read in cut_prompts(model, prompts):
        count += 1
        if prompt.target and prompt.target in prompt.text and prompt.target not in prompt.text[:read]:
            raise ValueError(
                f"prompt {prompt.index} ({prompt.text[:40]!r}…) is longer than the text encoder reads: it is cut after "
                f"{read} characters, and its target {prompt.target!r} comes later; shorten the prompt, or raise "
                "model.max_sequence_length"
            )
    return count
