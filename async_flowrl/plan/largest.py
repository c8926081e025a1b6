"""The largest images that a configuration can ask for: what passes through memory grows with them."""

from async_flowrl.config.paths import find_data
from async_flowrl.config.resolution import at_size, configured, largest
from async_flowrl.config.schema import Config, DataConfig
from async_flowrl.data.load import load_data
from async_flowrl.types import Resolution


def at_largest(config: Config) -> Config:
    """The configuration with its largest size for all images. Raises ValueError for sizes that are none.

    Prompts that are not on this machine are planned without: whoever runs them has them checked at the start.
    """
    return at_size(config, largest([*configured(config.rollout), *_of_prompts(config.data)]))


def _of_prompts(data: DataConfig) -> list[Resolution]:
    """Sizes that prompts bring. Files of lines have no columns, so they are not read for it."""
    try:
        files = [find_data(name, key="data", folder=True) for name in (data.train, data.evaluation) if name]
    except FileNotFoundError:
        return []
    if all(file.suffix == ".txt" for file in files):
        return []
    found = load_data(data, needs_target=False)
    return [*found.train.sizes, *found.evaluation.sizes]
