"""Parts that several tiny pipelines share: CLIP and T5 text encoders with their tokenizers, and an image VAE."""

import string
from typing import Any

import torch
from diffusers import AutoencoderKL
from tokenizers import pre_tokenizers
from transformers import CLIPTextConfig, CLIPTokenizer, Qwen2Tokenizer, T5Config, T5EncoderModel, T5Tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CLIP_DIM, T5_DIM = 16, 32
"""Output widths of the text encoders."""


def clip_tokenizer() -> Any:
    """Returns a tokenizer with one token per byte, CLIP's word ends, and at most 32 tokens instead of CLIP's 77."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [*alphabet, *(f"{letter}</w>" for letter in alphabet), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={entry: i for i, entry in enumerate(entries)}, merges=[], model_max_length=32)


def byte_tokenizer(**options: Any) -> Any:
    """Returns Qwen's tokenizer with one token per byte and three special ones."""
    entries = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL]
    return Qwen2Tokenizer(vocab={entry: i for i, entry in enumerate(entries)}, merges=[], **options)


def clip_text_encoder(kind: Any, tokenizer: Any) -> Any:
    """Returns a text encoder of class `kind`, which is CLIPTextModel or CLIPTextModelWithProjection."""
    return kind(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=CLIP_DIM,
            intermediate_size=32,
            projection_dim=CLIP_DIM,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=tokenizer.model_max_length,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def t5_tokenizer() -> Any:
    """Returns a tokenizer with one token per printable ASCII character."""
    letters = [letter for letter in string.printable if not letter.isspace()]
    entries = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in letters)]
    return T5Tokenizer(vocab=entries, extra_ids=0, model_max_length=512)


def t5_encoder(tokenizer: Any) -> Any:
    return T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer), d_model=T5_DIM, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0.0
        )
    )


def image_vae(contrast: float, *, scaling_factor: float, shift_factor: float) -> Any:
    """Returns a VAE with 16 latent channels and 8 pixels per side of a latent, as in SD3.5, FLUX.1 and Z-Image."""
    vae = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[8, 8, 16, 16],
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=4,
        sample_size=32,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    with torch.no_grad():
        vae.decoder.conv_out.weight.mul_(contrast)
    return vae.eval()
