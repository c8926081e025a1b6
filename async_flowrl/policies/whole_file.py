"""Whole transformers in diffusers' own form: written from trained weights, and put on diffusers' pipeline.

What was not trained (frozen parameters, saved tables) is the base model's.
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
"""Of one safetensors file, at most."""


def save(folder: Path, tensors: Mapping[str, Tensor], model: ResolvedModel) -> Path:
    """Writes `folder` with config.json and safetensors in the dtype that is computed in, whole or not at all.

    diffusers' `AutoModel.from_pretrained(folder)` loads it. What was there before gives way. Raises ValueError, naming
    a tensor, where they are not the model's.
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
    with quieter(inspect.getfile(save_torch_state_dict), logging.WARNING):  # so is its logger named
        save_torch_state_dict(state, work, filename_pattern=pattern, max_shard_size=SHARD)
    for file in work.iterdir():
        file.chmod(0o644)  # safetensors are written for their owner alone
    if folder.exists():
        folder.rename(old)
    work.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    return folder


def base_folder(model: ResolvedModel, parts: str = "transformer") -> Path:
    """The folder with the base's transformer; of a hub model, what is downloaded of it are its `parts`."""
    path = Path(model.path) if model.revision is None else download(model.path, model.revision, parts)
    return path / FOLDER


def is_whole(path: Path) -> bool:
    """Whether a path means a transformer's folder, and not a LoRA."""
    return (path / CONFIG).is_file() and any(path.glob(f"{FILE.removesuffix('.safetensors')}*"))


@torch.no_grad()
def put_on(pipeline: Any, folder: Path) -> None:
    """Overwrites the weights of the pipeline's transformer. Raises ValueError, one sentence, where they do not fit."""
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
