"""Prompts of which a family's text encoder reads only the beginning: diffusers cuts longer ones without a word."""

import logging
from functools import cache
from typing import Any

from async_flowrl.policies.pipeline_family import PipelineFamily
from async_flowrl.policies.registry import ResolvedModel, load_family
from async_flowrl.types import Prompt

logger = logging.getLogger(__name__)

# Tokens that a template and the tokenizer may add. A text never has more tokens than bytes, so one of fewer bytes than
# the limit less these is not tokenised.
MARGIN = 16


class LengthCheck:
    """Check of prompts that counts in `cut` those of which the model's text encoder reads only a part.

    Prompts of token ids, and families of your own without the tokenizer of a diffusers folder, are not counted.
    """

    def __init__(self, model: ResolvedModel, *, targets: bool = True) -> None:
        """`targets`: whether rewards look at targets, which then have to be in the part that is read."""
        family, self._targets = load_family(model.family), targets
        self._model, self._family = model, family if isinstance(family, PipelineFamily) else None
        self.cut = 0

    def __call__(self, prompt: Prompt) -> None:
        """Raises ValueError for a prompt whose target stands in its text, but only in the part that is not read."""
        if (read := self.read(prompt)) is None:
            return
        self.cut += 1
        if self._targets and prompt.target and prompt.target in prompt.text and prompt.target not in prompt.text[:read]:
            raise ValueError(
                f"the prompt {prompt.text[:40]!r}… is longer than the text encoder reads: it is cut after {read} "
                f"characters, and its target {prompt.target!r} comes later; shorten the prompt, or raise "
                "model.max_sequence_length"
            )

    def read(self, prompt: Prompt) -> int | None:
        """Returns the number of the prompt's characters that are read; None if that is all of them, or not known."""
        if self._family is None or self._model.random or not isinstance(prompt.wording, str):
            return None
        limit = self._model.max_sequence_length or self._family.text_tokens
        if len(prompt.text.encode()) < limit - MARGIN:
            return None
        tokenizer = _tokenizer(self._model.path, self._family.tokenizer, self._model.revision)
        if tokenizer is None or not tokenizer.is_fast:  # Only a fast one says where its tokens stand.
            return None
        text, start, kept = self._family.framed(tokenizer, prompt.text, limit)
        places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        if len(places) <= kept or (read := places[kept - 1][1] - start) >= len(prompt.text.rstrip()):
            return None
        return max(0, int(read))


@cache
def _tokenizer(path: str, folder: str, revision: str | None) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, subfolder=folder, revision=revision)
    except (OSError, ValueError) as error:
        logger.warning("whether prompts are longer than the text encoder reads is not known: %s", error)
        return None
