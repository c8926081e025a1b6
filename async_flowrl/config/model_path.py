"""The meaning of `model.path`: the tiny model, a local folder, or a hub name; and KNOWN, published models.

The architectures in KNOWN are there so that `async-flowrl plan` needs neither their weights nor the network. This
module does not import torch.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_flowrl.config.messages import did_you_mean
from async_flowrl.config.paths import expanded

_VAE_16: Mapping[str, Any] = {
    "_class_name": "AutoencoderKL",
    "sample_size": 1024,
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "latent_channels": 16,
    "scaling_factor": 1.5305,
    "shift_factor": 0.0609,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
CLIP_L, CLIP_G, T5_XXL = 123_060_480, 694_659_840, 4_762_310_656
"""Number of parameters of text encoders: CLIP-L without its projection, OpenCLIP bigG, the encoder of T5 v1.1 XXL."""
CLIP_L_PROJECTION = 768 * 768
"""Number of parameters of CLIP-L's projection."""


@dataclass(frozen=True)
class Architecture:
    """The parts of a model that decide about memory and time."""

    family: str
    """Name of the model family in the registry."""
    transformer: Mapping[str, Any]
    """transformer/config.json, without values that are the class's defaults."""
    vae: Mapping[str, Any]
    """vae/config.json, likewise."""
    text_parameters: int
    """Number of parameters of all text encoders together."""
    dtype: str = "bfloat16"
    """Dtype of the transformer's files."""


_QWEN_IMAGE = Architecture(
    "qwen_image",
    # The defaults of diffusers' class.
    {},
    {"_class_name": "AutoencoderKLQwenImage", "temperal_downsample": [False, True, True]},
    # Parameters of Qwen2.5-VL-7B.
    8_292_166_656,
)
_VAE_FLUX = {**_VAE_16, "scaling_factor": 0.3611, "shift_factor": 0.1159}


def _sd35(layers: int, positions: int, dual_attention_layers: int = 0) -> Architecture:
    """Stable Diffusion 3.5: as many heads of 64 channels as layers, `positions` of image tokens along each side."""
    network = {
        "sample_size": 128,
        "attention_head_dim": 64,
        "qk_norm": "rms_norm",
        "num_layers": layers,
        "num_attention_heads": layers,
        "caption_projection_dim": 64 * layers,
        "pos_embed_max_size": positions,
        "dual_attention_layers": list(range(dual_attention_layers)),
    }
    return Architecture("sd3", network, _VAE_16, CLIP_L + CLIP_L_PROJECTION + CLIP_G + T5_XXL)


KNOWN: Mapping[str, Architecture] = {
    "Qwen/Qwen-Image": _QWEN_IMAGE,
    "Qwen/Qwen-Image-2512": _QWEN_IMAGE,
    "stabilityai/stable-diffusion-3.5-medium": _sd35(24, 384, dual_attention_layers=13),
    "stabilityai/stable-diffusion-3.5-large": _sd35(38, 192),
    "black-forest-labs/FLUX.1-dev": Architecture("flux", {"guidance_embeds": True}, _VAE_FLUX, CLIP_L + T5_XXL),
    # The text encoder is Qwen3-4B without its output head.
    "Tongyi-MAI/Z-Image-Turbo": Architecture("z_image", {}, _VAE_FLUX, 4_022_468_096, "float32"),
}

PIPELINES = {
    "QwenImagePipeline": "qwen_image",
    "StableDiffusion3Pipeline": "sd3",
    "FluxPipeline": "flux",
    "ZImagePipeline": "z_image",
    "SanaPipeline": "sana",
}
"""Class name of a diffusers pipeline (`_class_name` of model_index.json) → family."""

TINY = "tiny"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def local_index(path: str) -> Path | None:
    """Returns model_index.json of a local folder; None for the tiny model and for a possible hub name.

    Raises ValueError, one sentence, for a folder without model_index.json, and for a path that is neither a folder nor
    a possible hub name.
    """
    if path == TINY:
        return None
    local = expanded(path)
    if local.exists():
        index = local / "model_index.json"
        if not index.is_file():
            raise ValueError(f"model.path {path} is not a diffusers folder: it has no model_index.json")
        return index
    if not _HUB_NAME.fullmatch(path):
        near = [str(entry) for entry in local.parent.iterdir()] if local.parent.is_dir() else []
        raise ValueError(not_found(path, "no such folder", near))
    return None


def not_found(path: str, reason: str, neighbours: Sequence[str] = ()) -> str:
    """Returns the error message for a model that was not found, with the most similar known name."""
    known, mistyped = [TINY, *KNOWN, *neighbours], _HUB_NAME.fullmatch(path) is not None
    hint = "" if path in known else did_you_mean(path, known, mistyped=mistyped)
    return f"model.path {path!r} was not found: {reason}{hint}"
