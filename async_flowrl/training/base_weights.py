"""Loads the base weights into several trainer ranks: rank 0 reads one tensor at a time and broadcasts it.

Each rank keeps its share. Only rank 0 opens the files, and no rank ever holds more than its share and one whole tensor.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from async_flowrl.policies.registry import DTYPES, ResolvedModel
from async_flowrl.policies.stored import StoredWeights
from async_flowrl.training.fsdp import World
from checkpoint_engine import base_digest


def digest_of_stored(model: ResolvedModel, world: World, parameters: set[str]) -> str:
    """Returns the digest of the base weights from the model's files on rank 0, and "" on other ranks.

    Only the tensors named in `parameters` count, as in the digest of a loaded model.
    """
    if world.rank != 0:
        return ""
    return base_digest(_Chosen(_stored(model), parameters))


def stream_base(
    transformer: nn.Module, model: ResolvedModel, world: World, *, device: torch.device, offload: bool
) -> None:
    """Gives parameters on the meta device memory and fills them from the files; all ranks must call it.

    Call it after `shard`, with an attached LoRA already in memory. Collectives run on `device`; the weights stay there,
    or with `offload` in host memory. Raises ValueError if files and network have different tensor names.
    """
    home = torch.device("cpu") if offload else device
    cast("Any", transformer)._apply(lambda t: torch.empty_like(t, device=home) if t.is_meta else t)
    stored = _stored(model) if world.rank == 0 else None
    targets = base_tensors(transformer)
    _same_names(targets, stored)
    for name in sorted(targets):
        target = targets[name]
        whole = torch.empty(target.shape, dtype=target.dtype, device=device)
        if stored is not None:
            whole.copy_(stored[name])
        dist.broadcast(whole, 0)
        _place(target, whole, world)
        del whole  # frees its memory before the next tensor is created


def base_tensors(transformer: nn.Module) -> dict[str, Tensor]:
    """Returns the base's parameters and saved buffers by their names in the model's files, without the LoRA."""
    state = cast("Any", transformer).state_dict(keep_vars=True)
    return {name.replace(".base_layer.", "."): t for name, t in state.items() if ".lora_" not in name}


def _stored(model: ResolvedModel) -> StoredWeights:
    return StoredWeights(model.path, dtype=DTYPES[model.dtype], revision=model.revision)


@torch.no_grad()
def _place(target: Tensor, whole: Tensor, world: World) -> None:
    """Copies this rank's share of `whole`. FSDP2 shards by rows like torch.chunk; some ranks may have none."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    chunks = torch.chunk(whole, world.per_replica, dim=0)
    number = world.rank % world.per_replica
    if number < len(chunks):
        target.to_local().copy_(chunks[number])


def _same_names(targets: Mapping[str, Tensor], stored: Mapping[str, Tensor] | None) -> None:
    """Raises ValueError on all ranks if names differ, so that no rank waits for another one in a collective."""
    odd = [sorted(targets.keys() ^ stored.keys())] if stored is not None else [None]
    dist.broadcast_object_list(odd, 0)
    if odd[0]:
        lacking = "the files lack" if odd[0][0] in targets else "the network has no"
        raise ValueError(f"the weights do not fit the model: {lacking} {odd[0][0]} ({len(odd[0])} names differ)")


class _Chosen(dict[str, Tensor]):
    """Some tensors of a mapping that reads them from files; they are read only when accessed."""

    def __init__(self, source: Mapping[str, Tensor], names: set[str]) -> None:
        super().__init__(dict.fromkeys(names & source.keys(), torch.empty(0)))
        self._source = source

    def __getitem__(self, name: str) -> Tensor:
        return self._source[name]
