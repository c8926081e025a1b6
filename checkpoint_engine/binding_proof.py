"""Binding proof: the weights that arrived are in the modules they belong to, with the right scale.

Digests prove that bytes arrived, not that each tensor reached its module: two equal-shaped tensors swapped before
hashing, or a wrong alpha, keep every digest right. So both ends compute scaling * B (A x) for each of their *named
modules*, with x seeded by the module's name, and compare. As B is zero at the start of training, an adapter with
random B (the canary) is delivered and probed before the first version.

Of tensors that a network computes with as they are (whole weights), each end digests its live bytes by the names that
the network itself has for them. The canary serves them, too: version 0 is what both ends loaded, with many equal
tensors, and would look right in a network that it never reached.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from checkpoint_engine.digest import digest_span, tensor_bytes
from checkpoint_engine.errors import WeightsMismatch
from checkpoint_engine.layout import Layout, dtype_of

CANARY_VERSION = -1
PROJECTIONS = 4
MAX_RELATIVE_DIFFERENCE = 1e-9
"""Of two probes; they are float64, so that only the order of summation can differ."""


@dataclass(frozen=True)
class LoraModule:
    """One adapted linear layer: a [rank, in], b [out, rank], y += scaling * b (a x)."""

    a: Tensor
    b: Tensor
    scaling: float


@torch.no_grad()
def binding_probe(modules: Mapping[str, LoraModule]) -> dict[str, Tensor]:
    """For each module, by its name: float64 [5], the norm of scaling * B (A x) and four projections of it.

    Raises WeightsMismatch for a module whose A and B don't fit each other.
    """
    return {name: _probe(name, modules[name]) for name in sorted(modules)}


@torch.no_grad()
def tensor_probe(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For each tensor, by its name: float64 [5], its norm and the four 32-bit words of its digest.

    One word that differs is a relative difference of one part in the norm, far above what `check_binding` allows.
    """
    return {name: _digested(tensors[name]) for name in sorted(tensors)}


def _digested(tensor: Tensor) -> Tensor:
    data = tensor_bytes(tensor)
    words = np.frombuffer(digest_span(data, 0), dtype="<u4").astype(np.float64)
    norm = torch.linalg.vector_norm(tensor.detach().cpu(), dtype=torch.float64)
    return torch.cat([norm.reshape(1), torch.from_numpy(words)])


def _probe(name: str, module: LoraModule) -> Tensor:
    a, b = module.a.detach().cpu().double(), module.b.detach().cpu().double()
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise WeightsMismatch(f"{name} has A {list(a.shape)} and B {list(b.shape)}: ranks differ")
    x = torch.randn(a.shape[1], generator=_generator(name, "x"), dtype=torch.float64)
    y = module.scaling * (b @ (a @ x))
    projections = torch.randn(PROJECTIONS, y.shape[0], generator=_generator(name, "y"), dtype=torch.float64)
    return torch.cat([y.norm().reshape(1), projections @ y])


def check_binding(trainer: Mapping[str, Tensor], receiver: Mapping[str, Tensor], *, who: str = "the receiver") -> None:
    """Compares two results of `binding_probe` or `tensor_probe`; raises WeightsMismatch naming what first differs.

    Modules whose output is zero at the trainer prove nothing and are refused too: probe with the canary.
    """
    for name in sorted(trainer.keys() | receiver.keys()):
        if name not in receiver or name not in trainer:
            where = who if name not in receiver else "the trainer"
            raise WeightsMismatch(f"{name} is not trained at {where}")
        mine, theirs = trainer[name], receiver[name]
        scale = float(mine[0])
        if not scale > 0.0:
            raise WeightsMismatch(f"{name} has output norm {scale:g} at the trainer: its binding can't be proven")
        gap = float((mine - theirs).abs().max()) / scale
        if not gap <= MAX_RELATIVE_DIFFERENCE:
            raise WeightsMismatch(
                f"{name} at {who} doesn't compute what the trainer's does: relative difference {gap:.3g} "
                f"(tensors of another module, A and B swapped, or another alpha)"
            )


def canary_tensors(layout: Layout, seed: int) -> dict[str, Tensor]:
    """Random tensors of a layout, each drawn from (seed, name), for the delivery that precedes version 0."""
    return {
        entry.name: torch.randn(entry.shape, generator=_generator(entry.name, str(seed))).to(dtype_of(entry))
        for entry in layout.entries
    }


def _generator(*names: str) -> torch.Generator:
    seed = int.from_bytes(hashlib.blake2b("/".join(names).encode(), digest_size=8).digest(), "little") >> 1
    return torch.Generator("cpu").manual_seed(seed)
