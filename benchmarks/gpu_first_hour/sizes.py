"""Models and sizes of the stages: published sizes with random weights on a real card, tiny models elsewhere."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from async_flowrl.config.schema import ModelConfig
from async_flowrl.policies.registry import resolve_model
from async_flowrl.policies.tiny import cached

COMMON = """
    experiment=qwen_image_1x80gb model.dtype=bfloat16 model.weights=random reward=color data=two_prompts
    hand_over=stream prompts_per_step=1 rollout.num_workers=1 rollout.text_encoder=resident rollout.batch_size=4
    algorithm.max_kl_per_update=null trainer.num_workers=1 trainer.micro_batch_size=2 trainer.updates_per_batch=1
"""
HEAD_DIM = 128
"""Qwen-Image's channels per attention head."""
AT_ONCE = min(8, max(2, len(os.sched_getaffinity(0)) // 2))
"""Programs that run beside one another; a tiny one leaves a card idle most of the time."""
TINY = {"qwen_image": "tiny", "sd35_medium": "tiny_sd3", "flux_dev": "tiny_flux"}
"""Model at full size → its stand-in, both in configs/model/."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the work, and of what single kernels compute."""

    full: bool
    """True for models at published size."""
    heads: int
    resolution: int
    steps: int
    """Denoising steps per image."""
    images: int
    """Images of a training step."""


FULL = Sizes(full=True, heads=24, resolution=512, steps=10, images=4)
SMALL = Sizes(full=False, heads=2, resolution=32, steps=8, images=4)
"""Sizes on a CPU and on a pretended device, where no figure counts."""


def real_card() -> bool:
    """Returns True if torch has a GPU that is not a pretended one (tests/pretend_gpu)."""
    return torch.cuda.is_available() and "pretended" not in torch.cuda.get_device_name().lower()


def sizes_here() -> Sizes:
    return FULL if real_card() else SMALL


def settings(sizes: Sizes, model: str = "qwen_image") -> list[str]:
    """Returns the settings of a run with a model at these sizes."""
    own = f"""
        model={model if sizes.full else TINY[model]} rollout.resolution={sizes.resolution}
        rollout.num_inference_steps={sizes.steps} group_size={sizes.images} ticket_size={sizes.images}
    """
    return [*COMMON.split(), *own.split()]


def one_block(work: Path, sizes: Sizes) -> list[str]:
    """Returns the settings of a run with the first block of Qwen-Image alone."""
    if not sizes.full:
        return [*settings(sizes), "model.tiny.layers=1"]

    def build(folder: Path) -> None:
        whole = resolve_model(ModelConfig(path="Qwen/Qwen-Image", weights="random")).path
        shutil.copytree(whole, folder, dirs_exist_ok=True)
        described = folder / "transformer" / "config.json"
        described.write_text(json.dumps(json.loads(described.read_text()) | {"num_layers": 1}))

    return [*settings(sizes), f"model.path={cached(work / 'models' / 'one_block', build)}"]
