"""The binding proof checks that delivered LoRA weights are in the right modules, with the right scale.

Digests notice neither two tensors of equal shape that were swapped before hashing, nor a wrong alpha. So both ends
compute scaling * B (A x) for each module, x seeded by its name, with an adapter of random B, the proof weights.
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

PROOF_VERSION = -1  # Version number of the proof weights.
PROJECTIONS = 4
# Largest allowed relative difference of two probes. They are float64 and differ only by the order of summation.
MAX_RELATIVE_DIFFERENCE = 1e-9


@dataclass(frozen=True)
class LoraModule:
    """One linear layer with LoRA: `a` [rank, in] and `b` [out, rank] add scaling * b (a x) to its output."""

    a: Tensor
    b: Tensor
    scaling: float


@torch.no_grad()
def binding_probe(modules: Mapping[str, LoraModule]) -> dict[str, Tensor]:
    """Returns module name → float64 [5]: the norm of y = scaling * B (A x), and four random projections of y."""
    return {name: _probe(name, modules[name]) for name in sorted(modules)}


@torch.no_grad()
def tensor_probe(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensor name → float64 [5]: the norm of the tensor, and the four 32-bit words of its digest as numbers."""
    # Different words differ by at least 1, which is far more than `check_binding` allows relative to the norm.
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
    """Compares two results of a probe; raises WeightsMismatch, naming what first differs at `who`."""
    # A module whose output is zero at the trainer is refused, too, because it proves nothing.
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


def proof_tensors(layout: Layout, seed: int) -> dict[str, Tensor]:
    """Returns the proof weights: random normal tensors of a layout, each drawn from (seed, name)."""
    return {
        entry.name: torch.randn(entry.shape, generator=_generator(entry.name, str(seed))).to(dtype_of(entry))
        for entry in layout.entries
    }


def _generator(*names: str) -> torch.Generator:
    seed = int.from_bytes(hashlib.blake2b("/".join(names).encode(), digest_size=8).digest(), "little") >> 1
    return torch.Generator("cpu").manual_seed(seed)
