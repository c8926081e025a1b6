"""Model of a configuration on PyTorch's meta device (shapes and dtypes, no weights), for the memory plan."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from async_flowrl.config.schema import Config
from async_flowrl.memory.sizes import Totals
from async_flowrl.memory.text_lengths import text_lengths
from async_flowrl.policies.architectures import KNOWN, Architecture
from async_flowrl.policies.lora import attach_lora
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.pipeline_family import PipelineFamily
from async_flowrl.policies.registry import DTYPES, load_family, resolve_model
from async_flowrl.policies.stored import configuration, elements_in
from async_flowrl.policies.tuning import FullTuning, tuning_of


@dataclass(frozen=True)
class MetaModel(Totals):
    """Policy without weights and its sizes; bytes are in the dtype that the run computes in.

    The adapter is what is trained: a LoRA, or with tune=full the trained weights of the transformer.
    """

    policy: PipelinePolicy
    """Policy with its adapter."""
    base_parameters: int
    """Number of parameters of the transformer without its LoRA."""
    block_bytes: tuple[int, ...]
    """Bytes of each transformer block of the base."""
    root_bytes: int
    """Bytes of the base that are in no block."""
    adapter_parameters: int
    """Number of trained parameters: those of the LoRA, or with tune=full those of the transformer."""
    text_parameters: int
    """Parameters of all text encoders."""
    vae_parameters: int
    buffer_bytes: int = 0
    """Bytes of the transformer's buffers (constant tables), which are never sharded."""
    itemsize: int = 4
    """Bytes of one number of the network and of a version."""
    family: str = ""
    full: bool = False
    """True: the trained parameters are the transformer's own (tune=full)."""


def build_meta_model(config: Config) -> MetaModel:
    """Builds the configuration's model on the meta device.

    Known published models need no files; any other model must be a local diffusers folder, or `tiny`. Raises
    ValueError if the architecture is not known or its family cannot be planned.
    """
    known, dtype = architecture(config)
    loaded = load_family(known.family)
    if not isinstance(loaded, PipelineFamily):
        raise ValueError(f"model.family {known.family} cannot be planned: it is no PipelineFamily")
    policy = loaded.on_meta(
        known.transformer,
        known.vae,
        dtype=DTYPES[dtype],
        max_sequence_length=config.model.max_sequence_length,
    )
    policy.planned_tokens = text_lengths(config).longest
    policy.decode_by_parts(images=config.rollout.vae_slicing, tiles=config.rollout.vae_tiling)
    blocks = tuple(sum(_bytes(p) for p in block.parameters()) for block in policy.blocks)
    base = list(policy.transformer.parameters())
    tuning = tuning_of(config)
    if isinstance(tuning, FullTuning):
        tuning.attach(policy, config.seed)
    else:
        attach_lora(policy.transformer, config.lora, policy)
    return MetaModel(
        policy=policy,
        base_parameters=sum(p.numel() for p in base),
        block_bytes=blocks,
        root_bytes=sum(_bytes(p) for p in base) - sum(blocks),
        adapter_parameters=sum(p.numel() for p in tuning.parameters(policy.transformer).values()),
        text_parameters=known.text_parameters,
        vae_parameters=sum(p.numel() for p in cast("nn.Module", policy._whole("decode").vae).parameters()),
        buffer_bytes=_buffer_bytes(policy.transformer, DTYPES[dtype]),
        itemsize=DTYPES[dtype].itemsize,
        family=known.family,
        full=isinstance(tuning, FullTuning),
    )


def architecture(config: Config) -> tuple[Architecture, str]:
    """Returns the model's architecture and the name of the dtype that it computes in.

    Raises ValueError if the model is neither known nor a local folder.
    """
    path = config.model.path
    if path in KNOWN:
        known = KNOWN[path]
        return known, known.dtype if config.model.dtype == "auto" else config.model.dtype
    resolved = resolve_model(config.model)
    folder = Path(resolved.path)
    if not folder.is_dir():
        raise ValueError(
            f"the architecture of {path} is not among those known ({', '.join(KNOWN)}); give a local folder to plan it"
        )
    transformer, vae = (configuration(resolved.path, part) for part in ("transformer", "vae"))
    text = sum(sum(elements_in(file).values()) for file in sorted(folder.glob("text_encoder*/*.safetensors")))
    return Architecture(resolved.family, transformer, vae, text, resolved.dtype), resolved.dtype


def conditioning(policy: PipelinePolicy, device: str = "meta") -> dict[str, Tensor]:
    """Returns the longest prompt's embeddings as zeros in float32, the dtype in which workers exchange them."""
    return {name: torch.zeros(shape, device=device) for name, shape in policy.conditioning_shapes().items()}


def _buffer_bytes(network: nn.Module, dtype: torch.dtype) -> int:
    """Bytes of the buffers; floating-point ones in the state dict have the dtype of the weights."""
    saved = network.state_dict(keep_vars=True)
    return sum(
        buffer.numel() * (dtype.itemsize if name in saved and buffer.is_floating_point() else buffer.element_size())
        for name, buffer in network.named_buffers()
    )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
