"""Random model for the doctor: layers of Qwen-Image's real shape, as many as the sizes say, without any download."""

from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel

from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.config.sections.model import TinyConfig
from async_flowrl.doctor.setting import Setting, Sizes
from async_flowrl.policies.tiny.qwen_image import tiny_pipeline

HEAD_DIM, ROPE_AXES = 128, (16, 56, 56)
"""Qwen/Qwen-Image's channels per attention head, and how they are divided among position axes (RoPE)."""
PROMPTS = tuple(" ".join([color] * words) for color, words in (("red", 61), ("blue", 31)))
"""Prompts of about 128 tokens, as memory plans assume; the tiny model's tokenizer splits words into short pieces."""
FAMILY = f"{__name__}:random_pipeline"


def random_pipeline(config: TinyConfig) -> Any:
    """Builds the tiny pipeline with a transformer of full-sized heads in bfloat16.

    Weights come from torch's global CPU generator. Runs name this function as `model.tiny.family` (FAMILY).
    """
    pipeline = tiny_pipeline(config)
    small = pipeline.transformer.config
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        transformer = QwenImageTransformer2DModel(
            patch_size=small.patch_size,
            in_channels=small.in_channels,
            out_channels=small.out_channels,
            num_layers=config.layers,
            attention_head_dim=HEAD_DIM,
            num_attention_heads=config.heads,
            joint_attention_dim=small.joint_attention_dim,
            axes_dims_rope=ROPE_AXES,
        )
    finally:
        torch.set_default_dtype(before)
    pipeline.register_modules(transformer=transformer.eval())
    return pipeline


def overrides(setting: Setting) -> list[str]:
    """Returns the overrides that give a run of any mode the sizes of the setting."""
    return [*model_overrides(setting), *work_overrides(setting.sizes)]


def model_overrides(setting: Setting, *, dtype: str = "bfloat16", layers: int | None = None) -> list[str]:
    """Returns the overrides for the random model, and writes prompts for it."""
    sizes, prompts = setting.sizes, setting.folder("prompts") / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    return [
        "model.path=tiny",
        f"model.tiny.family={FAMILY}",
        f"model.tiny.layers={layers or sizes.layers}",
        f"model.tiny.heads={sizes.heads}",
        f"model.dtype={dtype}",
        f"lora.rank={sizes.lora_rank}",
        f"lora.alpha={2 * sizes.lora_rank}",
        f"data.train={prompts}",
    ]


def work_overrides(sizes: Sizes) -> list[str]:
    """Returns the overrides for the work: two prompts per step, two trained denoising steps per image."""
    return [
        f"rollout.resolution={sizes.resolution}",
        f"rollout.num_inference_steps={sizes.num_inference_steps}",
        "algorithm.window=random",
        "algorithm.sde_window_size=2",
        "prompts_per_step=2",
        f"group_size={sizes.group_size}",
        f"trainer.micro_batch_size={sizes.group_size // 2}",
        "trainer.timesteps_per_forward=1",
        "trainer.learning_rate=1e-4",
    ]


def configuration(setting: Setting, *further: str) -> Config:
    """Returns the configuration for a worker outside a run: one_step_off with the random model."""
    nowhere = f"output_dir={setting.folder('nowhere')}/none"
    config: Config = compose_config("one_step_off", [*overrides(setting), nowhere, *further])
    return config
