"""Model of a configuration on the meta device: all that a memory plan needs to know of it, without weights."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from async_flowrl.config.schema import Config
from async_flowrl.policies.architectures import KNOWN
from async_flowrl.policies.lora import attach_lora, lora_parameters
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.pipeline_family import PipelineFamily
from async_flowrl.policies.registry import DTYPES, load_family, resolve_model
from async_flowrl.policies.stored import configuration


@dataclass(frozen=True)
class MetaModel:
    """`policy` carries the adapter; byte counts are in the dtype the run computes with."""

    policy: PipelinePolicy
    base_parameters: int
    block_bytes: tuple[int, ...]
    """Of each block, without the adapter."""
    root_bytes: int
    """Of what is in no block."""
    adapter_parameters: int
    text_parameters: int
    vae_parameters: int

    @property
    def base_bytes(self) -> int:
        return sum(self.block_bytes) + self.root_bytes


def build_meta_model(config: Config) -> MetaModel:
    """Published models need no files; anything else must be a local diffusers folder, or `tiny`.

    Raises ValueError in one sentence where the architecture is not known.
    """
    family, transformer, vae, text = _architecture(config)
    loaded = load_family(family)
    if not isinstance(loaded, PipelineFamily):
        raise ValueError(f"model.family {family} cannot be planned: it is no PipelineFamily")
    dtype = DTYPES[config.model.dtype]
    policy = loaded.on_meta(transformer, vae, dtype=dtype, max_sequence_length=config.model.max_sequence_length)
    blocks = tuple(sum(_bytes(p) for p in block.parameters()) for block in policy.blocks)
    base = list(policy.transformer.parameters())
    attach_lora(policy.transformer, config.lora, policy)
    return MetaModel(
        policy=policy,
        base_parameters=sum(p.numel() for p in base),
        block_bytes=blocks,
        root_bytes=sum(_bytes(p) for p in base) - sum(blocks),
        adapter_parameters=sum(p.numel() for p in lora_parameters(policy.transformer).values()),
        text_parameters=text,
        vae_parameters=sum(p.numel() for p in cast("nn.Module", policy._whole("decode").vae).parameters()),
    )


def _architecture(config: Config) -> tuple[str, Mapping[str, Any], Mapping[str, Any], int]:
    path = config.model.path
    if path in KNOWN:
        known = KNOWN[path]
        return known.family, known.transformer, known.vae, known.text_parameters
    resolved = resolve_model(config.model)
    folder = Path(resolved.path)
    if not folder.is_dir():
        raise ValueError(
            f"the architecture of {path} is not among those known ({', '.join(KNOWN)}); give a local folder to plan it"
        )
    transformer, vae = (configuration(resolved.path, part) for part in ("transformer", "vae"))
    text = sum(_stored_parameters(file) for file in sorted(folder.glob("text_encoder*/*.safetensors")))
    return resolved.family, transformer, vae, text


def _stored_parameters(file: Path) -> int:
    """Parameters in a safetensors file, from its header."""
    with safe_open(file, "pt") as opened:
        return sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118


def conditioning(policy: PipelinePolicy, device: str = "meta") -> dict[str, Tensor]:
    """A prompt's embeddings of usual length, float32 as they travel."""
    return {name: torch.zeros(shape, device=device) for name, shape in policy.conditioning_shapes().items()}


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
