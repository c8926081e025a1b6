"""Builds a tiny random Qwen-Image pipeline offline: the real architecture and file layout, 4 MB, made in a second.

The folder loads with `QwenImagePipeline.from_pretrained`; whatever runs on it runs on Qwen/Qwen-Image unchanged.
"""

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from async_flowrl.config import TinyConfig
from async_flowrl.policies.loading import quiet
from async_flowrl.seeds import untouched_rng

_RECIPE = 1
"""Part of the cache key; raise it when the built bytes change."""
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


def cache_dir() -> Path:
    """`$ASYNC_FLOWRL_CACHE`, or ~/.cache/async_flowrl."""
    return Path(os.environ.get("ASYNC_FLOWRL_CACHE", "~/.cache/async_flowrl")).expanduser()


def build_tiny(config: TinyConfig, cache: Path | None = None) -> Path:
    """The folder of the tiny pipeline for `config`, built on first use: the same bytes in every process, every time.

    Several processes may call it at once: each builds in its own temporary folder and the first rename wins.
    The global random state is left as it was. Raises ValueError on sizes that make no model.
    """
    _check(config)
    target = (cache or cache_dir()) / f"tiny-{_key(config)}"
    if (target / "model_index.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        with untouched_rng(config.seed), quiet():
            _pipeline(config).save_pretrained(work, safe_serialization=True)
        work.chmod(0o755)
        try:
            work.rename(target)
        except OSError:
            if not (target / "model_index.json").is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _check(config: TinyConfig) -> None:
    for name, least in (("layers", 1), ("heads", 1), ("seed", 0)):
        if getattr(config, name) < least:
            raise ValueError(f"model.tiny.{name} must be at least {least}, got {getattr(config, name)}")
    if not config.contrast > 0:
        raise ValueError(f"model.tiny.contrast must be positive, got {config.contrast}")


def _key(config: TinyConfig) -> str:
    """Random initialisation belongs to the libraries' versions, so they are part of the key."""
    versions = [diffusers.__version__, transformers.__version__, torch.__version__]
    text = json.dumps([_RECIPE, asdict(config), versions], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _pipeline(config: TinyConfig) -> Any:
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
        scheduler=_scheduler(),
        vae=vae.eval(),
        text_encoder=_text_encoder(tokenizer).eval(),
        tokenizer=tokenizer,
        transformer=transformer.eval(),
    )


def _scheduler() -> Any:
    """The settings of Qwen/Qwen-Image."""
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift=1.0,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )


def _tokenizer() -> Any:
    """A byte-level BPE whose merges come from the pipeline's own prompt template.

    The pipeline drops the template's first `prompt_template_encode_start_idx` tokens; only if the template is exactly
    that long here do the remaining tokens mean the prompt.
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
