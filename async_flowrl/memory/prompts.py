"""Sizes that prompts set for the memory of a run: the largest image, and the longest text.

A length in tokens is estimated from the bytes of the text; no tokenizer is needed.
"""

import math

from async_flowrl.config.paths import find_data
from async_flowrl.config.resolution import at_size, configured, largest
from async_flowrl.config.schema import Config, DataConfig
from async_flowrl.data.load import load_data
from async_flowrl.types import Prompt, Resolution

BYTES_PER_TOKEN = 3.0
"""Bytes of text that count as one token. English has about four, so that estimates are rather too long."""
USUAL_TOKENS = 128
"""Fewest tokens that are planned for a prompt, and the number if the prompts are not on this machine."""

_read: dict[str, tuple[list[Resolution], int]] = {}
"""Settings and state of the prompt files → what `_asked` returns."""


def at_largest(config: Config) -> Config:
    """Returns the configuration with its largest size for all images. Raises ValueError for an invalid size.

    The size is the largest of the settings and of the prompts that bring their own. If a prompt file is not on this
    machine, only the settings count.
    """
    sizes, _ = _asked(config.data)
    return at_size(config, largest([*configured(config.rollout), *sizes]))


def longest_prompt(config: Config) -> int:
    """Returns the length of the longest prompt, evaluations included.

    Raises PromptError if the file of prompts is invalid.
    """
    return _asked(config.data)[1]


def _asked(how: DataConfig) -> tuple[list[Resolution], int]:
    """Returns the sizes that prompts bring, and the planned length of the longest one in tokens."""
    try:
        paths = [find_data(name, key="data", folder=True) for name in (how.train, how.evaluation) if name]
    except FileNotFoundError:
        return [], USUAL_TOKENS
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    key = f"{how!r} {[(str(file.absolute()), file.stat().st_mtime_ns, file.stat().st_size) for file in files]}"
    if key not in _read:
        data = load_data(how, needs_target=False)
        tokens = max(map(tokens_of, (*data.train, *data.evaluation)), default=USUAL_TOKENS)
        _read[key] = [*data.train.sizes, *data.evaluation.sizes], tokens
    return _read[key]


def tokens_of(prompt: Prompt) -> int:
    """Returns the planned length of a prompt in tokens, at least USUAL_TOKENS.

    Token ids count as many as they are, with those of the template, which some families drop after the encoding.
    """
    wording = prompt.wording
    tokens = math.ceil(len(wording.encode()) / BYTES_PER_TOKEN) if isinstance(wording, str) else len(wording)
    return max(tokens, USUAL_TOKENS)
