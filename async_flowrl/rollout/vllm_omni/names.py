"""Names and shapes of a network's parameters, as diffusers and as vllm-omni have them.

vllm-omni packs projections into one parameter, shards parameters over ranks, and calls Qwen-Image's `attn.to_out.0`
`attn.to_out`. Nothing here needs vllm.
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
"""All ranks' shards of a tensor, put together along a dimension."""


@dataclass(frozen=True)
class NetworkShapes:
    """Shapes by diffusers' names: of the adapter's tensors and of the base weights; dtypes of the adapter's tensors."""

    adapter: dict[str, Shape]
    base: dict[str, Shape]
    dtypes: dict[str, torch.dtype]
    config: dict[str, Any]
    """Of the diffusers network, with its defaults."""

    def empty_adapter(self) -> dict[str, Tensor]:
        """Host tensors that versions of the adapter fit into, zero."""
        return {name: torch.zeros(shape, dtype=self.dtypes[name]) for name, shape in self.adapter.items()}


def network_shapes(config: Config, model: ResolvedModel) -> NetworkShapes:
    """From the model's configuration files, without weights.

    Raises ValueError where `lora.targets` names no layer of the network.
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
    """What the engine's network calls a module or parameter of the diffusers one.

    `packed` is the engine's own table, such as {"to_qkv": ["to_q", "to_k", "to_v"]}; `flat`: an attention's `to_out.0`
    is its `to_out`.
    """

    packed: Mapping[str, Sequence[str]]
    flat: bool

    def engine(self, name: str) -> str:
        """The engine's name of a module or parameter that it does not pack."""
        return _OUTPUT.sub(".to_out", name) if self.flat else name

    def key(self, name: str) -> str:
        """The key under which vllm's LoRA loader reads an adapter's tensor."""
        return f"base_model.model.transformer.{self.engine(name)}"

    def slice(self, name: str) -> tuple[str, int]:
        """(the engine's module, index of the slice) that holds module `name`; the slice is 0 where it is not packed."""
        prefix, _, leaf = name.rpartition(".")
        for whole, parts in self.packed.items():
            if leaf in parts:
                return f"{prefix}.{whole}", list(parts).index(leaf)
        return self.engine(name), 0


def unpacked(
    live: Mapping[str, Tensor], shapes: Mapping[str, Shape], names: Names, gather: Gather
) -> dict[str, Tensor]:
    """The network's parameters under diffusers' names and in its shapes, from the engine's packed and sharded ones.

    `gather` puts tensor-parallel shards together. Raises ValueError, naming it, for a parameter that is not there.
    """
    packed = names.packed
    shards = {part: shard for name, tensor in live.items() for part, shard in _parts(name, tensor, shapes, packed)}
    return {name: _whole(name, shards.get(names.engine(name)), shape, gather) for name, shape in shapes.items()}


def _parts(
    name: str, tensor: Tensor, shapes: Mapping[str, Shape], packed: Mapping[str, Sequence[str]]
) -> Iterable[tuple[str, Tensor]]:
    """The engine's parameter cut into what it packs; each part's rows are sharded alike."""
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
