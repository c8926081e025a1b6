"""Largest image size of a configuration; memory is planned for it, because activations grow with the image."""

from async_flowrl.config.paths import find_data
from async_flowrl.config.resolution import at_size, configured, largest
from async_flowrl.config.schema import Config, DataConfig
from async_flowrl.data.load import load_data
from async_flowrl.types import Resolution


def at_largest(config: Config) -> Config:
    """Returns the configuration with its largest size for all images. Raises ValueError for an invalid size.

    The size is the largest of the settings and of the prompts that bring their own. If a prompt file is not on this
    machine, only the settings count.
    """
    return at_size(config, largest([*configured(config.rollout), *_of_prompts(config.data)]))


def _of_prompts(data: DataConfig) -> list[Resolution]:
    """Returns the sizes that prompts bring. Text files of one prompt per line have no sizes and are not read."""
    try:
        files = [find_data(name, key="data", folder=True) for name in (data.train, data.evaluation) if name]
    except FileNotFoundError:
        return []
    if all(file.suffix == ".txt" for file in files):
        return []
    found = load_data(data, needs_target=False)
    return [*found.train.sizes, *found.evaluation.sizes]
