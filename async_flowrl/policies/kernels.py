"""Kernels of a network: those that repeat their bits, diffusers' attention backends, torch.compile block by block."""

import os
from typing import Any, cast

import torch
from torch import nn

from async_flowrl.config.messages import unknown_name
from async_flowrl.policies.base import Policy


def repeatable_kernels() -> None:
    """Makes CUDA give the same bits for the same work, in this process; CPUs do that anyway and are left as they are.

    Call it before the first matrix product. Afterwards torch raises RuntimeError, naming the operation, instead of
    running one that has no such kernel.
    """
    if not torch.cuda.is_available():
        return
    # Read when cuBLAS makes its first workspace.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    # Only there to expose reads of uninitialised memory, at the price of filling every new tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def use_attention(transformer: nn.Module, name: str) -> None:
    """Attention through one of diffusers' backends, in this process.

    Raises ValueError for a name diffusers does not know, a backend whose package is missing or does not run here, and a
    network that does not let its attention be chosen.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName

    known = [backend.value for backend in AttentionBackendName]
    if name not in known:
        raise ValueError(unknown_name("model.attention_backend", name, known))
    processors = [getattr(module, "processor", None) for module in transformer.modules()]
    if not any(hasattr(processor, "_attention_backend") for processor in processors):
        kind = type(transformer).__name__
        raise ValueError(f"model.attention_backend={name} has no effect on {kind}: diffusers does not dispatch it")
    try:
        cast("Any", transformer).set_attention_backend(name)
    except (RuntimeError, ImportError, ValueError) as error:
        raise ValueError(f"model.attention_backend={name} cannot be used: {error}") from error


def compile_blocks(policy: Policy, backend: str = "inductor") -> None:
    """Compiles each block where it is, so that names stay; after checkpointing, before sharding.

    Blocks of one kind share the compiled code, so a deep network takes no longer to compile than a shallow one.
    """
    for block in policy.blocks:
        block.compile(backend=backend)
