"""Trained weights as files, of either kind: a run's lora/ or transformer/, and what else generate and evaluate take."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from async_flowrl.config.schema import FULL, Config
from async_flowrl.policies import lora_file, whole_file
from async_flowrl.policies.lora_apply import apply_lora, weights_file
from async_flowrl.policies.registry import ResolvedModel


def save(folder: Path, tensors: Mapping[str, Tensor], config: Config, model: ResolvedModel) -> Path:
    """A LoRA for diffusers and PEFT, or with tune=full the whole transformer for diffusers; returns what to load."""
    if config.tune == FULL:
        return whole_file.save(folder, tensors, model)
    return lora_file.save(folder, tensors, alpha=config.lora.alpha, base=config.model.path)


def check(path: Path) -> None:
    """Raises ValueError for a path that is neither a transformer's folder nor a LoRA."""
    if not whole_file.is_whole(path):
        weights_file(path)


def apply(pipeline: Any, path: Path) -> None:
    """Puts what was trained on diffusers' pipeline. Raises ValueError, one sentence, where it does not fit."""
    if whole_file.is_whole(path):
        whole_file.put_on(pipeline, path)
    else:
        apply_lora(pipeline, path)
