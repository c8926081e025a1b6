"""Saves and loads whole transformers in diffusers' format, for runs with `tune=full`.

A saved transformer has the trained tensors, and the base model's for all others (frozen parameters, saved buffers).
"""

import inspect
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from async_flowrl.config.quiet import quieter
from async_flowrl.policies.download import download
from async_flowrl.policies.registry import DTYPES, ResolvedModel
from async_flowrl.policies.stored import FILE, FOLDER, StoredWeights

CONFIG = "config.json"
SHARD = "5GB"
"""Largest size of one safetensors file."""


def save(folder: Path, tensors: Mapping[str, Tensor], model: ResolvedModel) -> Path:
    """Writes a transformer in the dtype of `model` to `folder` (config.json, safetensors) and returns `folder`.

    diffusers' `AutoModel.from_pretrained(folder)` loads it. The files are written to another folder, which is then
    renamed, so `folder` is never incomplete; an older one is replaced. Raises ValueError for a tensor that is not in
    the model or has another shape.
    """
    from huggingface_hub import save_torch_state_dict

    dtype = DTYPES[model.dtype]
    stored = StoredWeights(model.path, dtype=dtype, revision=model.revision)
    _check(folder, tensors, stored)
    state = {name: tensors[name].to(dtype).contiguous() if name in tensors else stored[name] for name in sorted(stored)}
    work, old = (folder.with_name(f".{folder.name}-{what}") for what in ("unfinished", "old"))
    for left in (work, old):
        shutil.rmtree(left, ignore_errors=True)
    work.mkdir(parents=True)
    shutil.copyfile(base_folder(model) / CONFIG, work / CONFIG)
    pattern = FILE.replace(".safetensors", "{suffix}.safetensors")
    with quieter(inspect.getfile(save_torch_state_dict), logging.WARNING):  # the logger is named after the file
        save_torch_state_dict(state, work, filename_pattern=pattern, max_shard_size=SHARD)
    for file in work.iterdir():
        file.chmod(0o644)  # safetensors makes files that only their owner can read
    if folder.exists():
        folder.rename(old)
    work.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    return folder


def base_folder(model: ResolvedModel, parts: str = "transformer") -> Path:
    """Returns the base model's transformer folder; of a hub model the files for `parts` are downloaded."""
    path = Path(model.path) if model.revision is None else download(model.path, model.revision, parts)
    return path / FOLDER


def is_whole(path: Path) -> bool:
    """Returns True if `path` is the folder of a whole transformer."""
    return (path / CONFIG).is_file() and any(path.glob(f"{FILE.removesuffix('.safetensors')}*"))


@torch.no_grad()
def put_on(pipeline: Any, folder: Path) -> None:
    """Overwrites the transformer's weights in a diffusers pipeline. Raises ValueError, one sentence, if names or
    shapes differ."""
    state = pipeline.transformer.state_dict()
    dtype = next(pipeline.transformer.parameters()).dtype
    stored = StoredWeights(str(folder.parent), dtype=dtype, folder=folder.name)
    _check(folder, stored, state)
    if missing := sorted(state.keys() - stored.keys()):
        raise ValueError(f"{folder} lacks {missing[0]} of {type(pipeline).__name__} ({len(missing)} tensors missing)")
    for name, tensor in state.items():
        tensor.copy_(stored[name])


def _check(folder: Path, tensors: Mapping[str, Tensor], model: Mapping[str, Tensor]) -> None:
    for name in sorted(tensors):
        if name not in model:
            raise ValueError(f"{folder}: {name} is no tensor of the model")
        if tensors[name].shape != model[name].shape:
            shapes = f"{list(tensors[name].shape)}, expected {list(model[name].shape)}"
            raise ValueError(f"{folder}: {name} is {shapes}")
