"""Transports by name: checks, the choice of `auto`, and the links of the collective transports.

`object_store` sends payloads by calls of each receiver; gloo, nccl and pynccl broadcast them in a process group.
"""

import torch
import torch.distributed as dist

from checkpoint_engine.process_group import Link, TorchLink

OBJECT_STORE, GLOO, NCCL, PYNCCL, AUTO = "object_store", "gloo", "nccl", "pynccl", "auto"
ALTERNATIVES = "use gloo, object_store or auto"


def resolve_transport(configured: str, device: torch.device | str) -> str:
    """Returns `configured`; `auto` is nccl if the sender's device is a GPU and torch has NCCL, else object_store.

    Raises ValueError for one that cannot work here. That NCCL has a GPU for each receiver, the caller must check.
    """
    on_gpu = torch.device(device).type == "cuda"
    if configured == AUTO:
        return NCCL if on_gpu and dist.is_nccl_available() else OBJECT_STORE
    if configured in (NCCL, PYNCCL) and not on_gpu:
        raise ValueError(f"transport {configured} needs weights on a GPU, here they are on {device}: {ALTERNATIVES}")
    if configured == NCCL and not dist.is_nccl_available():
        raise ValueError(f"transport nccl needs a torch built with NCCL, this one has none: {ALTERNATIVES}")
    if configured == PYNCCL:
        from checkpoint_engine.pynccl import load_nccl

        load_nccl()
    return configured


def make_link(transport: str, device: torch.device) -> Link:
    """Returns a new Link of a collective transport. Raises ValueError for NCCL without a GPU or its library."""
    if transport in (NCCL, PYNCCL) and device.type != "cuda":
        raise ValueError(
            f"transport {transport} needs receivers that keep versions on a GPU, this one has them on {device}: "
            f"{ALTERNATIVES}"
        )
    if transport == PYNCCL:
        from checkpoint_engine.pynccl import PyncclLink

        return PyncclLink(device)
    return TorchLink(transport)


def transport_here(configured: str) -> str:
    """Returns the transport that `configured` means in this process. Raises ValueError if it cannot work here."""
    return resolve_transport(configured, "cuda" if torch.cuda.is_available() else "cpu")
