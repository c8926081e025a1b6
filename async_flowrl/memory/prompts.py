"""Sizes that prompts set for the memory of a run: the largest image, and the longest text."""

from async_flowrl.config.paths import find_data
from async_flowrl.config.resolution import Resolution, at_size, configured, largest
from async_flowrl.config.schema import Config, DataConfig
from async_flowrl.data.load import load_data
from async_flowrl.policies.pipeline import USUAL_TOKENS, estimated_tokens

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
        wordings = (prompt.wording for prompts in (data.train, data.evaluation) for prompt in prompts)
        tokens = max(map(estimated_tokens, wordings), default=USUAL_TOKENS)
        _read[key] = [*data.train.sizes, *data.evaluation.sizes], tokens
    return _read[key]
