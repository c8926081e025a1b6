"""Length of a configuration's longest prompt in tokens, estimated from its bytes; no tokenizer is needed."""

import math

from async_flowrl.config.paths import find_data
from async_flowrl.config.schema import Config
from async_flowrl.data.load import SPLITS, load_data
from async_flowrl.data.rows import split_files
from async_flowrl.types import Prompt

BYTES_PER_TOKEN = 3.0
"""Bytes of text that count as one token. English has about four, so that estimates are rather too long."""
USUAL_TOKENS = 128
"""Fewest tokens that are planned for a prompt, and the number if the prompts are not on this machine."""

_counted: dict[tuple[tuple[str, int, int], ...], int] = {}
"""Path, time of writing and bytes of each prompt file → tokens of the longest prompt in them."""


def longest_prompt(config: Config) -> int:
    """Returns the length of the longest prompt, evaluations included.

    Raises PromptError if the file of prompts is invalid.
    """
    how = config.data
    try:
        paths = [find_data(name, key="data", folder=True) for name in (how.train, how.evaluation) if name]
    except FileNotFoundError:
        return USUAL_TOKENS
    files = [file for path in paths for split in SPLITS for file in split_files(path, split) or ()]
    as_now = tuple((str(file.absolute()), file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    if as_now not in _counted:
        data = load_data(how, needs_target=False)
        _counted[as_now] = max(map(tokens_of, (*data.train, *data.evaluation)), default=USUAL_TOKENS)
    return _counted[as_now]


def tokens_of(prompt: Prompt) -> int:
    """Returns the planned length of a prompt in tokens, at least USUAL_TOKENS.

    Token ids count as many as they are, with those of the template, which some families drop after the encoding.
    """
    wording = prompt.wording
    tokens = math.ceil(len(wording.encode()) / BYTES_PER_TOKEN) if isinstance(wording, str) else len(wording)
    return max(tokens, USUAL_TOKENS)
