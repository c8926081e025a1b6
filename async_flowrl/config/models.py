"""Facts about models that need no torch: what `model.path` names, published architectures, and defaults of settings.

Settings that are null in a configuration get the default of the model's family.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from async_flowrl.config.error_text import did_you_mean
from async_flowrl.config.paths import config_dir, expanded

# Class name of a diffusers pipeline (`_class_name` of model_index.json) → family.
PIPELINES = {
    "QwenImagePipeline": "qwen_image",
    "QwenImage21Pipeline": "qwen_image_21",
    "QwenImageEditPlusPipeline": "qwen_image_edit",
    "StableDiffusion3Pipeline": "sd3",
    "FluxPipeline": "flux",
    "FluxKontextPipeline": "flux_kontext",
    "Flux2KleinPipeline": "flux2_klein",
    "ZImagePipeline": "z_image",
    "SanaPipeline": "sana",
    "WanPipeline": "wan",
    "WanImageToVideoPipeline": "wan_image",
}

TINY = "tiny"
# Folder of a clone, which is not in the wheel, with the models of experiment=glyphs and its kin.
GLYPHS_FOLDER = "examples/glyphs/"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Files of configs/family/: for tiny models (its values replace those of their family), and for families without a file.
TOY, OTHER = "toy", "other"
# A folder with fewer bytes of weights is a tiny model.
TOY_BYTES = 100_000_000


@dataclass(frozen=True)
class Architecture:
    """The parts of a published model that decide about memory and time, from configs/architectures/.

    `transformer`, `vae` and `scheduler` are the contents of their configuration files; a key that is missing has the
    default of its class. `text_parameters` are those of all text encoders together. With `boundary_ratio` there are two
    networks alike, the second for noise levels below it.
    """

    family: str
    transformer: Mapping[str, Any]
    vae: Mapping[str, Any]
    text_parameters: int
    dtype: str = "bfloat16"
    scheduler: Mapping[str, Any] | None = None
    boundary_ratio: float | None = None


@functools.cache
def architectures() -> Mapping[str, Architecture]:
    """Returns hub name → architecture of the models that have a file in configs/architectures/."""
    from omegaconf import OmegaConf

    by_name: dict[str, Architecture] = {}
    for file in sorted((config_dir() / "architectures").glob("*.yaml")):
        values = cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.load(file)))
        by_name |= dict.fromkeys(values.pop("names"), Architecture(**values))
    return by_name


def local_index(path: str) -> Path | None:
    """Returns model_index.json of a local folder; None for the tiny model and for a possible hub name.

    Raises ValueError, one sentence, for a folder without it, and for a path that is neither folder nor possible hub
    name.
    """
    if path == TINY:
        return None
    local = expanded(path)
    if local.exists():
        index = local / "model_index.json"
        if not index.is_file():
            raise ValueError(f"model.path {path!r} is not a diffusers folder: it has no model_index.json")
        return index
    if not _HUB_NAME.fullmatch(path):
        near = [str(entry) for entry in local.parent.iterdir() if entry.is_dir()] if local.parent.is_dir() else []
        reason = "no such folder" if local.is_absolute() else f"no such folder in {Path.cwd()}"
        if path.startswith(GLYPHS_FOLDER):
            reason += ", and it comes with a clone of the repository alone: start the run in the root of one"
        raise ValueError(not_found(path, reason, near))
    return None


def not_found(path: str, reason: str, neighbours: Sequence[str] = ()) -> str:
    names, mistyped = [TINY, *architectures(), *neighbours], _HUB_NAME.fullmatch(path) is not None
    hint = "" if path in names else did_you_mean(path, names, mistyped=mistyped)
    return f"model.path {path!r} was not found: {reason}{hint}"


def model_defaults(path: str, family: str, revision: str | None) -> dict[str, dict[str, Any]]:
    """Returns section → setting → default of a model, from configs/family/; `family` may be `auto`."""
    # A model that cannot be found gets the defaults of OTHER; who loads the model reports the error.
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
