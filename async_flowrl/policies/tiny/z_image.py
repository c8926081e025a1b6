"""Builds a tiny random Z-Image: one refiner block for the image, one for the text, then the main layers."""

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen3Config, Qwen3Model

from async_flowrl.config.schema import TinyConfig
from async_flowrl.policies.tiny.parts import SPECIAL, byte_tokenizer, image_vae

_TEXT_DIM = 32
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


def tiny_pipeline(config: TinyConfig) -> Any:
    """Returns the pipeline; its weights are drawn from torch's global CPU generator."""
    tokenizer = byte_tokenizer(
        additional_special_tokens=list(SPECIAL),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_TEMPLATE,
    )
    transformer = ZImageTransformer2DModel(
        dim=16 * config.heads,
        n_layers=config.layers,
        n_refiner_layers=1,
        n_heads=config.heads,
        n_kv_heads=config.heads,
        cap_feat_dim=_TEXT_DIM,
        axes_dims=[4, 6, 6],
        axes_lens=[256, 64, 64],
    )
    return ZImagePipeline(
        transformer=transformer.eval(),
        # The settings of Z-Image-Turbo.
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=image_vae(config.contrast, scaling_factor=0.3611, shift_factor=0.1159),
        text_encoder=_text_encoder(tokenizer).eval(),
        tokenizer=tokenizer,
    )


def _text_encoder(tokenizer: Any) -> Any:
    return Qwen3Model(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=_TEXT_DIM,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=512,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
