"""Lengths of the prompts of a configuration in tokens, estimated from their bytes, as they are padded in batches.

They are a function of the configuration and its prompts alone. A plan needs no tokenizer and downloads none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from async_flowrl.config.schema import Config
from async_flowrl.config.sections.data import DataConfig
from async_flowrl.data.load import Data, load_data
from async_flowrl.data.sampler import Sampler
from async_flowrl.tickets.batches import by_length
from async_flowrl.types import Prompt

BYTES_PER_TOKEN = 3.0
"""Bytes of text that count as one token. English has about four, so that estimates are rather too long."""
USUAL_TOKENS = 128
"""Fewest tokens that are planned for a prompt, and the number if the prompts are not on this machine."""
PLANNED_STEPS = 50
"""Training steps whose batches are looked at."""


@dataclass(frozen=True)
class TextLengths:
    """Lengths of prompts in tokens, each at least USUAL_TOKENS."""

    longest: int = USUAL_TOKENS
    """Length of the longest prompt, evaluations included."""
    padded: float = float(USUAL_TOKENS)
    """Mean length of a training ticket's text in a batch, with the padding to the longest text of its batch."""


def text_lengths(config: Config) -> TextLengths:
    """Returns the lengths of the configuration's prompts; the usual ones if a prompt file is not on this machine.

    Batches are those of the run's first PLANNED_STEPS steps (tickets/batches.py). Raises PromptError if the file of
    prompts is invalid.
    """
    how = config.data
    try:
        data = _loaded(how.train, how.evaluation, how.prompt_key, how.weight_key, how.held_out, how.held_out_seed)
    except FileNotFoundError:
        return TextLengths()
    tokens = [tokens_of(prompt) for prompt in data.train]
    longest = max([*tokens, *(tokens_of(prompt) for prompt in data.evaluation)])
    return TextLengths(longest, _mean_padded(config, data, tokens))


def tokens_of(prompt: Prompt) -> int:
    """Returns the planned length of a prompt in tokens, at least USUAL_TOKENS; that of token ids is exact."""
    wording = prompt.wording
    found = math.ceil(len(wording.encode()) / BYTES_PER_TOKEN) if isinstance(wording, str) else len(wording)
    return max(found, USUAL_TOKENS)


@lru_cache(maxsize=4)
def _loaded(
    train: str,
    evaluation: str | None,
    prompt_key: str,
    weight_key: str | None,
    held_out: float | None,
    held_out_seed: int,
) -> Data:
    """Loads prompts; cached, because a plan asks once per layout that it tries."""
    how = DataConfig(train, evaluation, prompt_key, weight_key, held_out, held_out_seed)
    return load_data(how, needs_target=False)


def _mean_padded(config: Config, data: Data, tokens: Sequence[int]) -> float:
    """Returns the mean length of a ticket's text with its padding; `tokens` has the length of each training prompt."""
    per_group, size = config.group_size // config.images_per_ticket, config.rollout.tickets_per_batch
    sampler = Sampler(
        len(tokens),
        config.prompts_per_step,
        seed=config.seed,
        shuffle=config.data.shuffle,
        weights=data.train.weights,
    )
    positions = tickets = 0
    for step in range(min(PLANNED_STEPS, config.total_steps)):
        chosen = sampler.step(step)
        order = by_length([data.train[index] for index in chosen])
        lengths = [tokens[chosen[group]] for group in order for _ in range(per_group)]
        for start in range(0, len(lengths), size):
            batch = lengths[start : start + size]
            positions, tickets = positions + max(batch) * len(batch), tickets + len(batch)
    return positions / tickets
