"""Builds tiny diffusers pipelines with random weights, offline: `model.path=tiny`, for tests and first trials.

A tiny model has the architecture and the files of the real family, about 4 MB, and takes about a second to build. The
function `tiny_pipeline` of each family's file makes its pipeline, of parts that are here.
"""

import functools
import hashlib
import json
import shutil
import string
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from async_flowrl.config.check import check_fields
from async_flowrl.config.error_text import unknown_name
from async_flowrl.config.models import PIPELINES
from async_flowrl.config.own_code import import_named
from async_flowrl.config.paths import cache_dir
from async_flowrl.config.schema import TinyConfig
from async_flowrl.seeds import untouched_rng

# Values of `model.tiny.family`, each a module beside this one.
TINY = tuple(PIPELINES.values())
# The tiny model of experiment=two_prompts, which keeps its bits; tests of families spread its norms themselves.
_AS_FIRST_TRAINED = "qwen_image"
# Part of the cache key; increase it when the built bytes change.
_RECIPE = 3
CLIP_DIM, T5_DIM, TEXT_DIM = 16, 32, 32
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def build_tiny(config: TinyConfig, cache: Path | None = None) -> Path:
    """Returns the folder of the tiny pipeline; it is built once, always with the same bytes. Raises ValueError."""
    if config.family not in TINY and ":" not in config.family:
        raise ValueError(unknown_name("model.tiny.family", config.family, TINY))
    check_fields(config, "model.tiny.")
    shipped = f"async_flowrl.policies.{config.family}:tiny_pipeline"

    def build(folder: Path) -> None:
        from async_flowrl.policies.pipeline_family import quiet

        tiny_pipeline = import_named("model.tiny.family", shipped if config.family in TINY else config.family)
        with untouched_rng(config.seed), quiet():
            pipeline = tiny_pipeline(config)
            if config.family in TINY and config.family != _AS_FIRST_TRAINED:
                spread_norms(pipeline)
            pipeline.save_pretrained(folder, safe_serialization=True)

    return cached((cache or cache_dir()) / f"tiny-{_key(config)}", build)


def cached(target: Path, build: Callable[[Path], None]) -> Path:
    """Returns the folder of a diffusers model, which `build` fills if it is not there."""
    # Several processes may call it at once: each builds in a temporary folder, and the first rename is kept.
    if (target / "model_index.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        build(work)
        work.chmod(0o755)
        try:
            work.rename(target)
        except OSError:
            if not (target / "model_index.json").is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _key(config: TinyConfig) -> str:
    # Library versions can change the random initialisation.
    text = json.dumps([_RECIPE, asdict(config), _versions()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def _versions() -> list[str]:
    # Cached, because Python parses a package's whole description for its version.
    return [version(package) for package in ("diffusers", "transformers", "torch")]


def spread_norms(pipeline: Any) -> None:
    """Adds -0.5 to 0.5 to the weights of each norm, which are all alike when a model is built.

    So a norm that is left out, or applied twice, shows; norms that store their factor less 1 change alike.
    """
    import torch

    modules = [part for part in pipeline.components.values() if isinstance(part, torch.nn.Module)]
    with torch.no_grad():
        for name, weight in (parameter for module in modules for parameter in module.named_parameters()):
            if name.endswith(("weight", "gamma")) and weight.numel() == len(weight):
                weight.add_(torch.linspace(-0.5, 0.5, len(weight)).view_as(weight))


def blocks(config: TinyConfig) -> dict[str, int]:
    """Returns numbers and widths of a transformer's blocks."""
    return {"num_layers": config.layers, "attention_head_dim": 16, "num_attention_heads": config.heads}


def contrasted(vae: Any, contrast: float) -> Any:
    """Returns the VAE, whose last layer gets `contrast` times its weights, for evaluation."""
    vae.decoder.conv_out.weight.data.mul_(contrast)
    return vae.eval()


def clip_tokenizer() -> Any:
    """Returns a tokenizer with one token per byte, CLIP's word ends, and at most 32 tokens instead of CLIP's 77."""
    from tokenizers import pre_tokenizers
    from transformers import CLIPTokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [*alphabet, *(f"{letter}</w>" for letter in alphabet), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={entry: i for i, entry in enumerate(entries)}, merges=[], model_max_length=32)


def byte_tokenizer(**options: Any) -> Any:
    """Returns Qwen's tokenizer with one token per byte and three special ones."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    entries = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL]
    return Qwen2Tokenizer(vocab={entry: i for i, entry in enumerate(entries)}, merges=[], **options)


def qwen_vl(tokenizer: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
    """Returns settings of a tiny Qwen-VL: of its text part, of its vision part, and the ids of its vision tokens."""
    end, pad = (tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("im_end", "endoftext"))
    text = {
        "hidden_size": TEXT_DIM,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(tokenizer),
        "bos_token_id": pad,
        "eos_token_id": end,
        "pad_token_id": pad,
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": TEXT_DIM}
    marks = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{mark}|>") for name, mark in marks.items()}
    return text, vision, ids


def qwen_image_scheduler() -> Any:
    """Returns a scheduler with the settings of Qwen/Qwen-Image, Qwen-Image-2.1 and Qwen-Image-Edit-2511."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    shift = {"base_shift": 0.5, "max_shift": 0.9, "shift": 1.0, "shift_terminal": 0.02}
    tokens = {"base_image_seq_len": 256, "max_image_seq_len": 8192}
    return FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="exponential", **shift, **tokens)


def clip_text_encoder(kind: Any, tokenizer: Any) -> Any:
    """Returns a text encoder of class `kind`, which is CLIPTextModel or CLIPTextModelWithProjection."""
    from transformers import CLIPTextConfig

    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    sizes = {"hidden_size": CLIP_DIM, "intermediate_size": 32, "projection_dim": CLIP_DIM, "num_hidden_layers": 2}
    length = tokenizer.model_max_length
    config = CLIPTextConfig(
        vocab_size=len(tokenizer), num_attention_heads=2, max_position_embeddings=length, **sizes, **special
    )
    return kind(config).eval()


def t5_tokenizer() -> Any:
    """Returns a tokenizer with one token per printable ASCII character."""
    from transformers import T5Tokenizer

    letters = [letter for letter in string.printable if not letter.isspace()]
    entries = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in letters)]
    return T5Tokenizer(vocab=entries, extra_ids=0, model_max_length=512)


def t5_encoder(tokenizer: Any) -> Any:
    from transformers import T5Config, T5EncoderModel

    sizes = {"d_model": T5_DIM, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    return T5EncoderModel(T5Config(vocab_size=len(tokenizer), dropout_rate=0.0, **sizes)).eval()


def image_vae(
    contrast: float,
    *,
    kind: str = "AutoencoderKL",
    latent_channels: int = 16,
    widths: Sequence[int] = (8, 8, 16, 16),
    **options: Any,
) -> Any:
    """Returns a VAE like that of SD3.5, FLUX and Z-Image; each of the `widths` but one halves the side."""
    import diffusers

    vae = getattr(diffusers, kind)(
        down_block_types=["DownEncoderBlock2D"] * len(widths),
        up_block_types=["UpDecoderBlock2D"] * len(widths),
        block_out_channels=list(widths),
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=4,
        sample_size=32,
        use_quant_conv=False,
        use_post_quant_conv=False,
        **options,
    )
    return contrasted(vae, contrast)
