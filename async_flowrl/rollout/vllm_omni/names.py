"""Layer names here (diffusers') and inside vllm-omni, which has `attn.to_out.0` as `attn.to_out` and packs projections.

Pure functions over names and tensors, so that they are tested where vllm is not installed.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

_OUTPUT = re.compile(r"\.to_out\.0(?=\.|$)")

Gather = Callable[[Tensor, int], Tensor]
"""All ranks' shards of a tensor, put together along a dimension."""


def engine_name(name: str) -> str:
    """The engine's name of a module or parameter."""
    return _OUTPUT.sub(".to_out", name)


def packed_place(name: str, packed: Mapping[str, Sequence[str]]) -> tuple[str, int] | None:
    """(the engine's packed module, index of the slice) that holds module `name`; None where it is not packed.

    `packed` is the network's own table, such as {"to_qkv": ["to_q", "to_k", "to_v"]}.
    """
    prefix, _, leaf = engine_name(name).rpartition(".")
    for whole, parts in packed.items():
        if leaf in parts:
            return f"{prefix}.{whole}", list(parts).index(leaf)
    return None


def adapter_tensors(layers: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """An adapter (A, B by module name) under the keys that vllm's LoRA loader reads."""
    found = {}
    for name, (a, b) in layers.items():
        prefix = f"base_model.model.transformer.{engine_name(name)}"
        found[f"{prefix}.lora_A.weight"], found[f"{prefix}.lora_B.weight"] = a, b
    return found


def unpacked(
    live: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    packed: Mapping[str, Sequence[str]],
    gather: Gather,
) -> dict[str, Tensor]:
    """The network's parameters under diffusers' names and in its shapes, from the engine's packed and sharded ones.

    `gather` puts tensor-parallel shards together. Raises ValueError, naming it, for a parameter that is not there.
    """
    found = {}
    for name, shape in shapes.items():
        tensor = live.get(engine_name(name))
        if tensor is None:
            tensor = _slice(name, live, shapes, packed)
        found[name] = _whole(name, tensor, shape, gather)
    return found


def _slice(
    name: str,
    live: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    packed: Mapping[str, Sequence[str]],
) -> Tensor:
    module, _, leaf = name.rpartition(".")
    place = packed_place(module, packed)
    whole = None if place is None else live.get(f"{place[0]}.{leaf}")
    if place is None or whole is None:
        raise ValueError(f"vllm-omni's network has no parameter for {name}")
    prefix, _, kind = place[0].rpartition(".")
    rows = [shapes[f"{prefix}.{part}.{leaf}"][0] for part in packed[kind]]
    shard = sum(rows) // whole.shape[0]
    start = sum(rows[: place[1]]) // shard
    return whole[start : start + rows[place[1]] // shard]


def _whole(name: str, tensor: Tensor, shape: tuple[int, ...], gather: Gather) -> Tensor:
    for dimension, (have, want) in enumerate(zip(tensor.shape, shape, strict=True)):
        if have != want:
            tensor = gather(tensor.contiguous(), dimension)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"vllm-omni's network holds {name} as {list(tensor.shape)}, expected {list(shape)}")
    return tensor
