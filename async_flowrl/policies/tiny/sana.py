"""Builds a tiny random SANA: a transformer with linear attention, a Gemma text encoder, a deep-compression VAE."""

from typing import Any

from diffusers import AutoencoderDC, FlowMatchEulerDiscreteScheduler, SanaPipeline, SanaTransformer2DModel
from transformers import Gemma2Config, Gemma2Model

from async_flowrl.config.schema import TinyConfig
from async_flowrl.policies.tiny.parts import byte_tokenizer

_TEXT_DIM = 32


def tiny_pipeline(config: TinyConfig) -> Any:
    """Returns the pipeline; its weights are drawn from torch's global CPU generator."""
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": _TEXT_DIM, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    transformer = SanaTransformer2DModel(
        in_channels=16,
        out_channels=16,
        num_attention_heads=config.heads,
        attention_head_dim=16,
        num_layers=config.layers,
        num_cross_attention_heads=config.heads,
        cross_attention_head_dim=16,
        cross_attention_dim=16 * config.heads,
        caption_channels=_TEXT_DIM,
        sample_size=32,
    )
    stages = {f"{part}coder_{what}": value for part in ("en", "de") for what, value in _STAGES.items()}
    return SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=Gemma2Model(Gemma2Config(vocab_size=len(tokenizer), **sizes, **heads)).eval(),
        vae=AutoencoderDC(latent_channels=16, scaling_factor=0.4, **stages).eval(),
        transformer=transformer.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


_STAGES: dict[str, Any] = {
    "block_out_channels": (8, 16, 16, 16),
    "layers_per_block": (1,) * 4,
    "qkv_multiscales": ((),) * 4,
}
