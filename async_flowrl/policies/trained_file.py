"""Files of trained weights, either a LoRA or a whole transformer: saves a run's weights, loads them into a pipeline.

A run saves to lora/ or transformer/; `generate` and `evaluate` also load weights from elsewhere.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from async_flowrl.config.schema import FULL, Config
from async_flowrl.policies import lora_file, whole_file
from async_flowrl.policies.lora_apply import apply_lora, weights_file
from async_flowrl.policies.registry import ResolvedModel


def save(folder: Path, tensors: Mapping[str, Tensor], config: Config, model: ResolvedModel) -> Path:
    """Saves a LoRA for diffusers and PEFT or, with tune=full, the whole transformer for diffusers.

    `tensors` are by layout name (see policies/lora.py). Returns the path from which diffusers loads.
    """
    if config.tune == FULL:
        return whole_file.save(folder, tensors, model)
    return lora_file.save(folder, tensors, alpha=config.lora.alpha, base=config.model.path)


def check(path: Path) -> None:
    """Raises ValueError if `path` is neither the folder of a whole transformer nor a LoRA."""
    if not whole_file.is_whole(path):
        weights_file(path)


def apply(pipeline: Any, path: Path) -> None:
    """Loads the trained weights at `path` into a diffusers pipeline. Raises ValueError if they do not fit."""
    if whole_file.is_whole(path):
        whole_file.put_on(pipeline, path)
    else:
        apply_lora(pipeline, path)
