"""Test of stock pipelines: images have the requested size."""

from typing import Any

import pytest
import torch
from diffusers import AutoencoderDC, FlowMatchEulerDiscreteScheduler, SanaPipeline, SanaTransformer2DModel

from async_flowrl.cli.generate import Settings, run_pipeline
from async_flowrl.config.schema import ModelConfig
from async_flowrl.types import Sampling

BLOCKS, WIDTHS = ("ResBlock", "EfficientViTBlock"), (8, 8)


class OwnFamily:
    """As a user's own: only what `generate` asks of it."""

    def guidance_arguments(self, sampling: Sampling) -> dict[str, Any]:
        return {"guidance_scale": 1.0}


def tiny_sana() -> Any:
    transformer = SanaTransformer2DModel(
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=8,
        sample_size=32,
    )
    vae = AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=BLOCKS,
        decoder_block_types=BLOCKS,
        encoder_block_out_channels=WIDTHS,
        decoder_block_out_channels=WIDTHS,
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
    )
    return SanaPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=vae,
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
    )


def test_a_pipeline_that_prefers_sizes_of_its_own_makes_the_one_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """SANA's would otherwise make 1024 x 1024 pixels of 32, a thousand times the work, and shrink them."""
    pipeline, sizes = tiny_sana(), []
    pipeline.set_progress_bar_config(disable=True)
    forward = pipeline.transformer.forward

    def watched(latents: torch.Tensor, *rest: Any, **more: Any) -> Any:
        sizes.append(tuple(latents.shape[-2:]))
        return forward(latents, *rest, **more)

    monkeypatch.setattr(pipeline.transformer, "forward", watched)
    settings = Settings(ModelConfig(family=f"{__name__}:OwnFamily"), Sampling(32, 1, 1.0, 0.0, " ", "ode", 0.0))
    embedded = {"prompt_embeds": torch.zeros(1, 8, 8), "prompt_attention_mask": torch.ones(1, 8)}
    images = run_pipeline(pipeline, settings, None, **embedded)
    assert (images.shape, sizes) == ((1, 32, 32, 3), [(16, 16)])
