"""Largest image size of a configuration; memory is planned for it, because activations grow with the image."""

from async_flowrl.config.paths import find_data
from async_flowrl.config.resolution import at_size, configured, largest
from async_flowrl.config.schema import Config, DataConfig
from async_flowrl.data.load import Data, load_data
from async_flowrl.types import Resolution


def at_largest(config: Config) -> Config:
    """Returns the configuration with its largest size for all images. Raises ValueError for an invalid size.

    The size is the largest of the settings and of the prompts that bring their own. If a prompt file is not on this
    machine, only the settings count.
    """
    return at_size(config, largest([*configured(config.rollout), *_of_prompts(config.data)]))


def _of_prompts(data: DataConfig) -> list[Resolution]:
    sized = prompts_with_sizes(data)
    return [] if sized is None else [*sized.train.sizes, *sized.evaluation.sizes]


def prompts_with_sizes(data: DataConfig) -> Data | None:
    """Returns the prompts if they may have sizes of their own, else None.

    The result is None if a prompt file is not on this machine, or if all are text files with one prompt per line, which
    cannot have sizes.
    """
    try:
        files = [find_data(name, key="data", folder=True) for name in (data.train, data.evaluation) if name]
    except FileNotFoundError:
        return None
    return None if all(file.suffix == ".txt" for file in files) else load_data(data, needs_target=False)
