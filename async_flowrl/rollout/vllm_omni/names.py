"""Names and shapes of a network's parameters in diffusers and in vllm-omni, and the translation between them.

vllm-omni packs several projections into one parameter, shards parameters over its ranks, and renames `attn.to_out.0`
of Qwen-Image to `attn.to_out`. This module needs no vllm.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from async_flowrl.config.schema import Config
from async_flowrl.policies.lora import attach_lora, compute_dtypes, lora_parameters
from async_flowrl.policies.registry import DTYPES, ResolvedModel, load_family

_OUTPUT = re.compile(r"\.to_out\.0(?=\.|$)")

Shape = tuple[int, ...]
Gather = Callable[[Tensor, int], Tensor]
"""Function of (local shard, dimension) that returns the shards of all ranks, concatenated along the dimension."""


@dataclass(frozen=True)
class NetworkShapes:
    """Shapes of a network's parameters, by the names of diffusers."""

    adapter: dict[str, Shape]
    """Shapes of the adapter's (LoRA's) tensors."""
    base: dict[str, Shape]
    """Shapes of the base weights."""
    dtypes: dict[str, torch.dtype]
    """Dtypes of the adapter's tensors."""
    config: dict[str, Any]
    """Configuration of the diffusers network, with its defaults."""

    def empty_adapter(self) -> dict[str, Tensor]:
        """Returns zero tensors in host memory, into which a version of the adapter fits."""
        return {name: torch.zeros(shape, dtype=self.dtypes[name]) for name, shape in self.adapter.items()}


def network_shapes(config: Config, model: ResolvedModel) -> NetworkShapes:
    """Returns the shapes, from the model's configuration files without its weights.

    Raises ValueError if `lora.targets` names no layer of the network.
    """
    policy = load_family(model.family).load(
        model.path,
        dtype=DTYPES[model.dtype],
        device=torch.device("cpu"),
        parts="structure",
        revision=model.revision,
    )
    base = _shapes(policy.transformer.named_parameters())
    attach_lora(policy.transformer, config.lora, policy)
    adapter = _shapes(lora_parameters(policy.transformer).items())
    described: Any = policy.transformer.config
    return NetworkShapes(adapter, base, compute_dtypes(policy.transformer), dict(described))


def _shapes(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Shape]:
    return {name: tuple(parameter.shape) for name, parameter in parameters}


@dataclass(frozen=True)
class Names:
    """Translation of diffusers' names of modules and parameters to those of vllm-omni's network (the engine's)."""

    packed: Mapping[str, Sequence[str]]
    """Packed module → its parts, from the engine, such as {"to_qkv": ["to_q", "to_k", "to_v"]}."""
    flat: bool
    """Whether the engine names an attention's `to_out.0` `to_out`."""

    def engine(self, name: str) -> str:
        """Returns the engine's name of a module or parameter that is not packed."""
        return _OUTPUT.sub(".to_out", name) if self.flat else name

    def key(self, name: str) -> str:
        """Returns the key under which vllm's LoRA loader reads a tensor of the adapter."""
        return f"base_model.model.transformer.{self.engine(name)}"

    def slice(self, name: str) -> tuple[str, int]:
        """Returns the engine's module that holds module `name`, and its slice in it; 0 if the module is not packed."""
        prefix, _, leaf = name.rpartition(".")
        for whole, parts in self.packed.items():
            if leaf in parts:
                return f"{prefix}.{whole}", list(parts).index(leaf)
        return self.engine(name), 0


def unpacked(
    live: Mapping[str, Tensor], shapes: Mapping[str, Shape], names: Names, gather: Gather
) -> dict[str, Tensor]:
    """Returns the network's parameters under diffusers' names and in its `shapes`, from the engine's `live` parameters.

    `gather` concatenates the shards of all ranks. Raises ValueError for a missing parameter or another shape.
    """
    packed = names.packed
    shards = {part: shard for name, tensor in live.items() for part, shard in _parts(name, tensor, shapes, packed)}
    return {name: _whole(name, shards.get(names.engine(name)), shape, gather) for name, shape in shapes.items()}


def _parts(
    name: str, tensor: Tensor, shapes: Mapping[str, Shape], packed: Mapping[str, Sequence[str]]
) -> Iterable[tuple[str, Tensor]]:
    """Splits the engine's parameter into the parts that it packs; the rows of each part are sharded evenly."""
    module, _, leaf = name.rpartition(".")
    prefix, _, whole = module.rpartition(".")
    if whole not in packed:
        return [(name, tensor)]
    parts = [f"{prefix}.{part}.{leaf}" for part in packed[whole]]
    rows = [shapes[part][0] for part in parts]
    ranks = sum(rows) // len(tensor)
    return zip(parts, tensor.split_with_sizes([count // ranks for count in rows]), strict=True)


def _whole(name: str, tensor: Tensor | None, shape: Shape, gather: Gather) -> Tensor:
    if tensor is None:
        raise ValueError(f"vllm-omni's network has no parameter for {name}")
    for dimension, (have, want) in enumerate(zip(tensor.shape, shape, strict=True)):
        if have != want:
            tensor = gather(tensor.contiguous(), dimension)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"vllm-omni's network holds {name} as {list(tensor.shape)}, expected {list(shape)}")
    return tensor
