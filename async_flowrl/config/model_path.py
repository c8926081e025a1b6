"""The meaning of `model.path`: the tiny model, a local folder, or a hub name. It does not import torch."""

import re
from collections.abc import Sequence
from pathlib import Path

from async_flowrl.config.architectures import architectures
from async_flowrl.config.messages import did_you_mean
from async_flowrl.config.paths import expanded

PIPELINES = {
    "QwenImagePipeline": "qwen_image",
    "StableDiffusion3Pipeline": "sd3",
    "FluxPipeline": "flux",
    "ZImagePipeline": "z_image",
    "SanaPipeline": "sana",
}
"""Class name of a diffusers pipeline (`_class_name` of model_index.json) → family."""

TINY = "tiny"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def local_index(path: str) -> Path | None:
    """Returns model_index.json of a local folder; None for the tiny model and for a possible hub name.

    Raises ValueError, one sentence, for a folder without model_index.json, and for a path that is neither a folder nor
    a possible hub name.
    """
    if path == TINY:
        return None
    local = expanded(path)
    if local.exists():
        index = local / "model_index.json"
        if not index.is_file():
            raise ValueError(f"model.path {path} is not a diffusers folder: it has no model_index.json")
        return index
    if not _HUB_NAME.fullmatch(path):
        near = [str(entry) for entry in local.parent.iterdir()] if local.parent.is_dir() else []
        raise ValueError(not_found(path, "no such folder", near))
    return None


def not_found(path: str, reason: str, neighbours: Sequence[str] = ()) -> str:
    """Returns the error message for a model that was not found, with the most similar known name."""
    names, mistyped = [TINY, *architectures(), *neighbours], _HUB_NAME.fullmatch(path) is not None
    hint = "" if path in names else did_you_mean(path, names, mistyped=mistyped)
    return f"model.path {path!r} was not found: {reason}{hint}"
