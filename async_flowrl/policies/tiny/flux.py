"""Builds a tiny random FLUX.1-dev: double- and single-stream blocks, and the guidance scale as network input."""

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextModel

from async_flowrl.config.schema import TinyConfig
from async_flowrl.policies.tiny.parts import (
    CLIP_DIM,
    T5_DIM,
    clip_text_encoder,
    clip_tokenizer,
    image_vae,
    t5_encoder,
    t5_tokenizer,
)


def tiny_pipeline(config: TinyConfig) -> Any:
    """Returns the pipeline, with `layers` blocks of each kind; weights are drawn from the global CPU generator."""
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    transformer = FluxTransformer2DModel(
        num_layers=config.layers,
        num_single_layers=config.layers,
        attention_head_dim=16,
        num_attention_heads=config.heads,
        joint_attention_dim=T5_DIM,
        pooled_projection_dim=CLIP_DIM,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    return FluxPipeline(
        transformer=transformer.eval(),
        # The settings of FLUX.1-dev.
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=3.0, use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, max_image_seq_len=4096
        ),
        vae=image_vae(config.contrast, scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=clip_text_encoder(CLIPTextModel, clip).eval(),
        tokenizer=clip,
        text_encoder_2=t5_encoder(t5).eval(),
        tokenizer_2=t5,
    )
