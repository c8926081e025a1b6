"""Builds a tiny random Qwen-Image: tokenizer, text encoder, transformer and a video VAE."""

import json
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from async_flowrl.config.schema import TinyConfig

_HEAD_DIM = 16
_TEXT_DIM = 32
_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


_TEXT_IDS = ("endoftext", "im_end", "image_pad", "video_pad", "vision_start", "vision_end")


def tiny_pipeline(config: TinyConfig) -> Any:
    """Returns the pipeline; its weights are drawn from torch's global CPU generator."""
    tokenizer = _tokenizer()
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=64,
        out_channels=16,
        num_layers=config.layers,
        attention_head_dim=_HEAD_DIM,
        num_attention_heads=config.heads,
        joint_attention_dim=_TEXT_DIM,
        axes_dims_rope=(4, 6, 6),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=8, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    with torch.no_grad():
        vae.decoder.conv_out.weight.mul_(config.contrast)
    return QwenImagePipeline(
        # The settings of Qwen/Qwen-Image.
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            base_image_seq_len=256,
            max_image_seq_len=8192,
            shift=1.0,
            shift_terminal=0.02,
            time_shift_type="exponential",
        ),
        vae=vae.eval(),
        text_encoder=_text_encoder(tokenizer).eval(),
        tokenizer=tokenizer,
        transformer=transformer.eval(),
    )


def _tokenizer() -> Any:
    """Returns a byte-level BPE tokenizer with merges learned from the pipeline's own prompt template.

    The pipeline drops the first `prompt_template_encode_start_idx` tokens, so the template before the prompt must have
    exactly that many tokens. Raises RuntimeError if it has another number.
    """
    bare = QwenImagePipeline(scheduler=None, vae=None, text_encoder=None, tokenizer=None, transformer=None)
    template, drop = bare.prompt_template_encode, bare.prompt_template_encode_start_idx
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=600, min_frequency=1, initial_alphabet=alphabet, show_progress=False)
    text = template
    for special in _SPECIAL:
        text = text.replace(special, "\x00")
    bpe.train_from_iterator([part.replace("{}", "") for part in text.split("\x00")], trainer=trainer)
    learned = json.loads(bpe.to_str())["model"]
    vocabulary = dict(learned["vocab"])
    for special in _SPECIAL:
        vocabulary[special] = len(vocabulary)
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[tuple(merge) for merge in learned["merges"]],
        additional_special_tokens=list(_SPECIAL),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    length = len(tokenizer(template.split("{}")[0]).input_ids)
    if length != drop:
        raise RuntimeError(f"the tiny tokenizer makes {length} tokens of the template, the pipeline drops {drop}")
    return tokenizer


def _text_encoder(tokenizer: Any) -> Any:
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in _TEXT_IDS}
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "hidden_size": _TEXT_DIM,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": len(tokenizer),
                "max_position_embeddings": 2048,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
                "bos_token_id": ids["endoftext"],
                "eos_token_id": ids["im_end"],
                "pad_token_id": ids["endoftext"],
            },
            vision_config={
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_heads": 2,
                "out_hidden_size": _TEXT_DIM,
                "fullatt_block_indexes": [0],
            },
            image_token_id=ids["image_pad"],
            video_token_id=ids["video_pad"],
            vision_start_token_id=ids["vision_start"],
            vision_end_token_id=ids["vision_end"],
        )
    )
