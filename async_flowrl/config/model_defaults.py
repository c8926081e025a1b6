"""Defaults that depend on the model: the settings that are null in a configuration until its family is known."""

import functools
import json
from pathlib import Path
from typing import Any, cast

from async_flowrl.config.architectures import architectures
from async_flowrl.config.model_path import PIPELINES, TINY, local_index
from async_flowrl.config.paths import config_dir

TOY, OTHER = "toy", "other"
"""Files of configs/family/ for tiny models, which come before their family's, and for families that have none."""
TOY_BYTES = 100_000_000
"""A folder with fewer bytes of weights is a tiny model."""


def model_defaults(path: str, family: str, revision: str | None) -> dict[str, dict[str, Any]]:
    """Returns section → setting → default of a model, from configs/family/.

    `family` may be `auto`. A model that cannot be found has the defaults of other models: what needs it says why it was
    not found.
    """
    if family == "auto":
        family = _family_of_files(path, revision)
    values = _values(family if (config_dir() / "family" / f"{family}.yaml").is_file() else OTHER)
    toy = _values(TOY) if is_toy(path) else {}
    return {section: {**settings, **toy.get(section, {})} for section, settings in values.items()}


@functools.cache
def _values(name: str) -> dict[str, dict[str, Any]]:
    from omegaconf import OmegaConf

    loaded = OmegaConf.to_container(OmegaConf.load(config_dir() / "family" / f"{name}.yaml"))
    return cast("dict[str, dict[str, Any]]", loaded)


def _family_of_files(path: str, revision: str | None) -> str:
    from async_flowrl.config.hub import hub_file

    try:
        index = local_index(path)
        if index is None and path in architectures():
            return architectures()[path].family
        index = index or hub_file(path, "model_index.json", revision)
        return PIPELINES.get(json.loads(index.read_text()).get("_class_name"), OTHER)
    except (OSError, ValueError, AttributeError):
        return OTHER


def is_toy(path: str) -> bool:
    """Returns True for `model.path=tiny`, and for a folder with weights that take less than TOY_BYTES."""
    weights = Path(path).expanduser().glob("*/*.safetensors")
    return path == TINY or 0 < sum(file.stat().st_size for file in weights) < TOY_BYTES
