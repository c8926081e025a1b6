"""Transports by name: checks, the choice of `auto`, and the ends of the collective transports in workers.

`object_store` sends payloads by calls of each receiver; gloo, nccl and pynccl broadcast them in a process group.
"""

from difflib import get_close_matches

import torch
import torch.distributed as dist

from checkpoint_engine.collective import CollectiveReceiver, CollectiveSender, Member
from checkpoint_engine.process_group import Epoch, TorchLink
from checkpoint_engine.publisher import SealedVersions
from checkpoint_engine.receiver import Receiver
from checkpoint_engine.side_stream import concrete

OBJECT_STORE, GLOO, NCCL, PYNCCL, AUTO = "object_store", "gloo", "nccl", "pynccl", "auto"
ALTERNATIVES = "use gloo, object_store or auto"
TRANSPORTS = (OBJECT_STORE, GLOO, NCCL, PYNCCL, AUTO)


def resolve_transport(configured: str, device: torch.device | str) -> str:
    """Returns `configured`; `auto` is nccl if the sender's device is a GPU and torch has NCCL, else object_store.

    NCCL also needs a GPU of its own for each receiver, which the caller must check. Raises ValueError for a name that
    is not in TRANSPORTS, or that cannot work with this device and the installed libraries.
    """
    if configured not in TRANSPORTS:
        close = get_close_matches(configured, TRANSPORTS, n=1, cutoff=0.0)
        raise ValueError(f"transport is one of {list(TRANSPORTS)}, got {configured!r} (nearest: {close[0]})")
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


def check_receiver(transport: str, device: torch.device) -> None:
    """Raises ValueError if a receiver that keeps versions on `device` cannot take part in the transport's groups."""
    if transport in (NCCL, PYNCCL) and device.type != "cuda":
        raise ValueError(
            f"transport {transport} needs receivers that keep versions on a GPU, this one has them on {device}: "
            f"{ALTERNATIVES}"
        )


def make_member(transport: str, device: torch.device | str = "cpu") -> Member:
    """Returns this process's Member of gloo, nccl or pynccl. Opening raises ValueError if its library is missing."""
    if transport == GLOO:
        return Member(lambda: TorchLink(GLOO))
    if transport == NCCL:
        return Member(lambda: TorchLink(NCCL), device)
    if transport != PYNCCL:
        raise ValueError(f"collective transports are {[GLOO, NCCL, PYNCCL]}, got {transport!r}")
    from checkpoint_engine.pynccl import PyncclLink

    where = concrete(device)  # here, as the thread that makes the link has another current GPU
    return Member(lambda: PyncclLink(where), where)


class SendingEnd:
    """The end of trainer rank 0. All methods except `abort` run on the lane (worker thread) for publishing."""

    def __init__(self, publisher: SealedVersions, device: torch.device) -> None:
        self._publisher, self._device = publisher, device
        self.sender: CollectiveSender  # Set when the group's address is asked for.

    def address(self, transport: str, host: str) -> tuple[str, int]:
        if not hasattr(self, "sender"):
            self.sender = CollectiveSender(self._publisher, make_member(transport, self._device), host=host)
        return self.sender.address()

    def abort(self) -> None:
        if hasattr(self, "sender"):
            self.sender.abort()


class ReceivingEnd:
    """The end of a rollout worker. All methods except `abort` run on the lane (worker thread) for deliveries."""

    def __init__(self, receiver: Receiver) -> None:
        self._retains = receiver
        self.receiver: CollectiveReceiver  # Set when the worker joins a group.

    def open(self, transport: str, epoch: Epoch, rank: int) -> None:
        """Joins a group. Raises TransferFailed; ValueError if the transport cannot write where versions are kept."""
        if not hasattr(self, "receiver"):
            device = self._retains.slot_device
            check_receiver(transport, device)
            self.receiver = CollectiveReceiver(self._retains, make_member(transport, device))
        self.receiver.open(epoch, rank)

    def abort(self) -> None:
        if hasattr(self, "receiver"):
            self.receiver.abort()


def transport_here(configured: str) -> str:
    """Returns the transport that `configured` means in this process. Raises ValueError if it cannot work here."""
    return resolve_transport(configured, "cuda" if torch.cuda.is_available() else "cpu")
