"""Tensors that are sent over NCCL, and what a test asks of a pretended device alone."""

import os

import pytest
import torch

PRETENDED = "PRETEND_CUDA_DEVICES" in os.environ

on_pretended = pytest.mark.skipif(not PRETENDED, reason="looks into the pretended device")


def tensors(rows: int = 20_000, *, fill: float | None = None) -> dict[str, torch.Tensor]:
    """Six float32 tensors [rows, 64], 31 MB: four buckets."""
    generator = torch.Generator("cuda").manual_seed(0)
    made = {f"m{i}": torch.randn(rows, 64, device="cuda", generator=generator) for i in range(6)}
    return made if fill is None else {name: torch.full_like(tensor, fill) for name, tensor in made.items()}
