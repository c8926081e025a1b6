"""A model's files without the model: the configurations of its parts, and single tensors of the transformer."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor

from async_flowrl.config.messages import first_line
from async_flowrl.policies.download import download, hub_file

FOLDER = "transformer"
"""Folder of the transformer in a diffusers model."""
FILE = "diffusion_pytorch_model.safetensors"
"""Name of the transformer's weights file; the names of several files, and of their index, are derived from it."""


class StoredWeights(Mapping[str, Tensor]):
    """The tensors of safetensors files, by their name in the network; each access reads the tensor from the file.

    Floating-point tensors are cast to `dtype`. `path` is a local diffusers folder, or a hub name that is downloaded at
    `revision`; `folder` is the folder in it. Raises ValueError if it has no safetensors files.
    """

    def __init__(self, path: str, *, dtype: torch.dtype, revision: str | None = None, folder: str = FOLDER) -> None:
        place = (Path(path) if revision is None else download(path, revision, "transformer")) / folder
        index = place / f"{FILE}.index.json"
        if index.is_file():
            files: dict[str, str] = json.loads(index.read_text())["weight_map"]
            self._files = {name: place / file for name, file in files.items()}
        elif (place / FILE).is_file():
            with safe_open(place / FILE, framework="pt") as file:
                self._files = dict.fromkeys(file.keys(), place / FILE)
        else:
            raise ValueError(f"{place} holds no {FILE}: only safetensors weights are loaded")
        self._dtype = dtype

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def configuration(path: str, part: str, revision: str | None = None) -> dict[str, Any]:
    """Returns config.json of one part of the model, e.g. "transformer" or "vae".

    `path` is a local folder, or a hub name with its `revision`. Raises ValueError if the file cannot be read.
    """
    name = f"{part}/config.json"
    try:
        file = Path(path) / name if revision is None else hub_file(path, name, revision)
        return cast("dict[str, Any]", json.loads(file.read_text()))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{name} of model.path {path} cannot be read: {first_line(error)}") from error
