"""A run directory with checkpoints of a tiny model's adapter, to be exported."""

from dataclasses import asdict
from pathlib import Path

import torch
from omegaconf import OmegaConf
from torch import Tensor

from async_flowrl.config.schema import Config, LoraConfig
from async_flowrl.policies.lora import lora_parameters
from async_flowrl.policies.qwen_image import QwenImagePolicy
from async_flowrl.training.checkpoint import Checkpoint, write_checkpoint

LORA = LoraConfig(rank=4, alpha=10.0)


def write_config(folder: Path, config: Config) -> None:
    """config.yaml as a run leaves it."""
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(asdict(config))))


def run_directory(folder: Path, policy: QwenImagePolicy, *, ema: bool) -> dict[str, Tensor]:
    """checkpoints/step_3 and step_7 as the trainer writes them; returns the weights of step 7."""
    weights = {name: p.detach().clone() for name, p in lora_parameters(policy.transformer).items()}
    zeros = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    halves = {name: tensor / 2 for name, tensor in weights.items()}
    trainer = {"lora": {"rank": LORA.rank, "alpha": LORA.alpha}}
    for step, tensors in ((3, zeros), (7, weights)):
        parts = {"weights": tensors, **({"ema": halves} if ema else {})}
        write_checkpoint(folder / "checkpoints", step, Checkpoint(parts, trainer, {}), keep=2)
    return weights
