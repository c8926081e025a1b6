"""Lengths of the prompts of a configuration in tokens, estimated from their bytes, as they are padded in batches.

They are a function of the configuration and its prompts alone. A plan needs no tokenizer and downloads none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from async_flowrl.config.paths import find_data
from async_flowrl.config.schema import Config
from async_flowrl.config.sections.data import DataConfig
from async_flowrl.data.load import SPLITS, Data, load_data
from async_flowrl.data.rows import split_files
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
    choice = how.prompt_key, how.weight_key, how.held_out, how.held_out_seed
    try:
        counted = _counted(how.train, how.evaluation, *choice, as_now=_written(how))
    except FileNotFoundError:
        return TextLengths()
    return TextLengths(counted.longest, _mean_padded(config, counted))


def tokens_of(prompt: Prompt) -> int:
    """Returns the planned length of a prompt in tokens, at least USUAL_TOKENS.

    Token ids count as many as they are, with those of the template, which some families drop after the encoding.
    """
    wording = prompt.wording
    tokens = math.ceil(len(wording.encode()) / BYTES_PER_TOKEN) if isinstance(wording, str) else len(wording)
    return max(tokens, USUAL_TOKENS)


@dataclass(frozen=True)
class _Counted:
    """Prompts and their lengths in tokens."""

    data: Data
    tokens: Sequence[int]
    """Length of each training prompt."""
    longest: int
    """Length of the longest prompt, evaluations included."""


def _written(how: DataConfig) -> tuple[tuple[str, int, int], ...]:
    """Returns path, time of writing and bytes of each prompt file. Raises FileNotFoundError if one is missing."""
    paths = [find_data(name, key="data", folder=True) for name in (how.train, how.evaluation) if name]
    files = [file for path in paths for split in SPLITS for file in split_files(path, split) or ()]
    return tuple((str(file.absolute()), file.stat().st_mtime_ns, file.stat().st_size) for file in files)


@lru_cache(maxsize=4)
def _counted(
    train: str,
    evaluation: str | None,
    prompt_key: str,
    weight_key: str | None,
    held_out: float | None,
    held_out_seed: int,
    *,
    as_now: tuple[tuple[str, int, int], ...],
) -> _Counted:
    """Loads prompts and counts their tokens; cached, because a plan asks several times per layout that it tries.

    `as_now` is what `_written` gives: files that were written again are read again.
    """
    how = DataConfig(train, evaluation, prompt_key, weight_key, held_out, held_out_seed)
    data = load_data(how, needs_target=False)
    tokens = tuple(tokens_of(prompt) for prompt in data.train)
    return _Counted(data, tokens, max([*tokens, *(tokens_of(prompt) for prompt in data.evaluation)]))


def _mean_padded(config: Config, counted: _Counted) -> float:
    """Returns the mean length of a training ticket's text with its padding."""
    data, tokens = counted.data, counted.tokens
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
