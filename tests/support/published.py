"""A hub cache with the configuration files of published models, but without their weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub import COMMIT, used_here

TEXT_DIM = {"joint_attention_dim": 4096, "pooled_projection_dim": 768}
FOUR_WIDTHS = {"block_out_channels": [128, 256, 512, 512]}
Models = Mapping[str, Mapping[str, Mapping[str, Any]]]
MODELS: Models = {
    "Qwen/Qwen-Image": {
        "model_index.json": {"_class_name": "QwenImagePipeline"},
        "transformer/config.json": {
            "in_channels": 64, "patch_size": 2, "joint_attention_dim": 3584, "guidance_embeds": False,
        },
        "vae/config.json": {"temperal_downsample": [False, True, True]},
    },
    "stabilityai/stable-diffusion-3.5-medium": {
        "model_index.json": {"_class_name": "StableDiffusion3Pipeline"},
        "transformer/config.json": {"in_channels": 16, "patch_size": 2, **TEXT_DIM},
        "vae/config.json": FOUR_WIDTHS,
    },
    "black-forest-labs/FLUX.1-dev": {
        "model_index.json": {"_class_name": "FluxPipeline"},
        "transformer/config.json": {"in_channels": 64, "guidance_embeds": True, **TEXT_DIM},
        "vae/config.json": FOUR_WIDTHS,
    },
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": {
        "model_index.json": {"_class_name": "WanPipeline"},
        "transformer/config.json": {"in_channels": 16, "patch_size": [1, 2, 2], "text_dim": 4096, "num_layers": 30},
        "vae/config.json": {"temperal_downsample": [False, True, True]},
    },
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": {
        "model_index.json": {"_class_name": "WanPipeline", "boundary_ratio": 0.875},
        "transformer/config.json": {"in_channels": 16, "patch_size": [1, 2, 2], "text_dim": 4096, "num_layers": 1},
        "vae/config.json": {"temperal_downsample": [False, True, True]},
        "scheduler/scheduler_config.json": {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0},
    },
}  # fmt: skip
"""Model → file → the entries of that file that the checks before a run read."""


def use_published_models(folder: Path, monkeypatch: pytest.MonkeyPatch, models: Models = MODELS) -> None:
    """Writes the cache into `folder` and makes this process use it; the hub itself is then not asked."""
    for model, without in models.items():
        files = {**without, "scheduler/scheduler_config.json": {"shift": 3.0}}
        repository = folder / f"models--{model.replace('/', '--')}"
        for file, content in files.items():
            path = repository / "snapshots" / COMMIT / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content))
        (repository / "refs").mkdir()
        (repository / "refs/main").write_text(COMMIT)
    used_here(monkeypatch, folder)
