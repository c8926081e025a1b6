"""Tiny Stable Diffusion 3.5 with random weights, which needs no download; for `model.path=tiny` and the tests.

It has the parts of the published model: three text encoders, and in its first transformer block the second attention
over image tokens alone (`dual_attention_layers`) that SD 3.5 medium has.
"""

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import CLIPTextModelWithProjection

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

_HEAD_DIM = 16


def tiny_pipeline(config: TinyConfig) -> Any:
    """Returns a StableDiffusion3Pipeline in evaluation mode; layers, heads and contrast are those of `config`.

    Weights are drawn from torch's global generator, so equal seeds give equal weights.
    """
    clip, t5 = clip_tokenizer(), t5_tokenizer()
    transformer = SD3Transformer2DModel(
        sample_size=4,
        num_layers=config.layers,
        attention_head_dim=_HEAD_DIM,
        num_attention_heads=config.heads,
        joint_attention_dim=T5_DIM,
        caption_projection_dim=_HEAD_DIM * config.heads,
        pooled_projection_dim=2 * CLIP_DIM,
        pos_embed_max_size=16,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        transformer=transformer.eval(),
        # The shift, and the VAE's scaling factor and shift factor, are those of SD 3.5.
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=image_vae(config.contrast, scaling_factor=1.5305, shift_factor=0.0609),
        text_encoder=clip_text_encoder(CLIPTextModelWithProjection, clip).eval(),
        tokenizer=clip,
        text_encoder_2=clip_text_encoder(CLIPTextModelWithProjection, clip).eval(),
        tokenizer_2=clip,
        text_encoder_3=t5_encoder(t5).eval(),
        tokenizer_3=t5,
    )
