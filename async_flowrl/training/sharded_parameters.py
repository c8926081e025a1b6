"""This rank's share of all trained tensors as one flat float32 vector, for tune=full with trainer.shard=full.

FSDP2 gives each rank some rows of each tensor. What is elementwise (optimizer, averages, versions) needs no other rank;
norms and counts are added up over the ranks in the order of their numbers, so all get the same bits.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from async_flowrl.training.flat import FlatParameters, padded
from async_flowrl.training.fsdp import World, let_go


class ShardedParameters(FlatParameters):
    """As FlatParameters, but vectors and named tensors are this rank's share: shapes [rows of this rank, ...].

    `values` are the masters; the network's sharded parameters are float32 copies, from which FSDP2 gathers blocks.
    `numel` counts whole tensors. All ranks must call `norm`, `total` and `fingerprint` together.
    """

    sharded = True

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], network: nn.Module, world: World, device: torch.device
    ) -> None:
        """`parameters` are FSDP2's, with their weights, by layout name; `network` has them."""
        self._network, self.world = network, world
        self._locals = {name: local_of(parameter) for name, parameter in sorted(parameters.items())}
        self._wholes = {name: tuple(parameter.shape) for name, parameter in sorted(parameters.items())}
        self._shapes = {name: local.shape for name, local in self._locals.items()}
        self._offsets, end = padded(self._shapes)
        self.values = nn.Parameter(torch.zeros(end, device=device))
        self.gradients = torch.zeros(end, device=device)
        self.values.grad = self.gradients
        self.numel = sum(math.prod(shape) for shape in self._wholes.values())
        gradients = self.named(self.gradients)
        for name, view in self.named(self.values.data).items():
            view.copy_(self._locals[name])
            hook = _moved_to(gradients[name])
            parameters[name].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @property
    def wholes(self) -> Mapping[str, tuple[int, ...]]:
        """Tensor name → shape of the whole tensor."""
        return self._wholes

    @staticmethod
    def gathered(parameter: Tensor) -> Tensor:
        """Returns a whole parameter of the network, float32 or as it is frozen; all ranks must call it together."""
        return cast("DTensor", parameter.detach()).full_tensor()

    def norm(self, flat: Tensor) -> float:
        own = torch.linalg.vector_norm(flat, dtype=torch.float64).reshape(1)
        return math.hypot(*(float(norm) for norm in self.world.gather(own)))

    def total(self, count: int) -> int:
        own = torch.tensor([count], dtype=torch.int64, device=self.values.device)
        return sum(int(of_rank) for of_rank in self.world.gather(own))

    def fingerprint(self) -> str:
        """Returns a hash over those of all ranks' shares, 64 bits in hex; equal on all ranks."""
        own = int(super().fingerprint(), 16)
        signed = torch.tensor([own - (1 << 64) if own >> 63 else own], dtype=torch.int64, device=self.values.device)
        by_rank = b"".join(int(of_rank).to_bytes(8, "little", signed=True) for of_rank in self.world.gather(signed))
        return blake2b(by_rank, digest_size=8).hexdigest()

    def _compute_with(self, flat: Tensor) -> None:
        # FSDP2 keeps what it gathered for the outermost parameters until a backward pass.
        let_go(self._network)
        views = self.named(flat)
        torch._foreach_copy_(list(self._locals.values()), [views[name] for name in self._locals])

    @contextmanager
    def swapped(self, flat: Tensor) -> Iterator[None]:
        self._compute_with(flat)
        try:
            yield
        finally:
            self.changed()


def local_of(parameter: Tensor) -> Tensor:
    """Returns this rank's share of FSDP2's parameter, in its memory."""
    return cast("DTensor", parameter.detach()).to_local()


def _moved_to(gradient: Tensor) -> Callable[[Tensor], None]:
    """Returns a hook that adds a parameter's new gradient, summed over the ranks, to `gradient` and frees it."""

    def hook(parameter: Tensor) -> None:
        if parameter.grad is not None:
            gradient.add_(local_of(parameter.grad))
            parameter.grad = None

    return hook
