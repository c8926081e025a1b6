"""Architectures of published models, from configs/architectures/: what a plan and `model.weights=random` go by."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from async_flowrl.config.paths import config_dir


@dataclass(frozen=True)
class Architecture:
    """The parts of a model that decide about memory and time. A key that is missing has the default of its class."""

    family: str
    """Name of the model family in the registry."""
    transformer: Mapping[str, Any]
    """transformer/config.json."""
    vae: Mapping[str, Any]
    """vae/config.json."""
    text_parameters: int
    """Number of parameters of all text encoders together."""
    dtype: str = "bfloat16"
    """Dtype of the transformer's files."""
    scheduler: Mapping[str, Any] | None = None
    """scheduler/scheduler_config.json; None if it is not needed."""


@functools.cache
def architectures() -> Mapping[str, Architecture]:
    """Returns hub name → architecture of the models that have a file in configs/architectures/."""
    from omegaconf import OmegaConf

    by_name: dict[str, Architecture] = {}
    for file in sorted((config_dir() / "architectures").glob("*.yaml")):
        values = cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.load(file)))
        by_name |= dict.fromkeys(values.pop("names"), Architecture(**values))
    return by_name
