"""Tensors that are sent over NCCL, a sender by itself, a delivery, and what a test asks of a pretended device alone."""

import os

import pytest
import torch

from checkpoint_engine import Publisher, Receiver
from checkpoint_engine.collective import CollectiveSender
from checkpoint_engine.process_group import Epoch

PRETENDED = "PRETEND_CUDA_DEVICES" in os.environ

on_pretended = pytest.mark.skipif(not PRETENDED, reason="looks into the pretended device")


def tensors(rows: int = 20_000, *, fill: float | None = None) -> dict[str, torch.Tensor]:
    """Six float32 tensors [rows, 64], 31 MB: four buckets."""
    generator = torch.Generator("cuda").manual_seed(0)
    made = {f"m{i}": torch.randn(rows, 64, device="cuda", generator=generator) for i in range(6)}
    return made if fill is None else {name: torch.full_like(tensor, fill) for name, tensor in made.items()}


def alone(transport: str, sender: CollectiveSender, number: int = 0) -> Epoch:
    """An epoch of which the sender is the only member."""
    return Epoch(transport, number, "secret", *sender.address(), 1, 60.0)


def deliver(rows: int) -> None:
    """Versions staged, sealed, received and activated on the device, the weights changing at once after the staging.

    The sealing lane is a stream of its own, and so is the delivering one.
    """
    source = tensors(rows)
    publisher = Publisher(source)
    live = tensors(rows, fill=0.0)
    receiver = Receiver(live)
    for version in range(4):
        for tensor in source.values():
            tensor.fill_(float(version))
        publisher.stage(version)
        for tensor in source.values():
            tensor.fill_(-1.0)
        publisher.seal(version)
        receiver.receive(*publisher.payload(version))
        receiver.activate("policy", version)
        assert all(bool((tensor == float(version)).all()) for tensor in live.values())
