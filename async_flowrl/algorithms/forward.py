"""Draws on the forward process x_t = (1 - t) x0 + t eps, shared by algorithms that train on final images."""

from collections.abc import Sequence

import torch
from torch import Tensor

from async_flowrl.algorithms.base import MicroBatch
from async_flowrl.algorithms.sde import expand
from async_flowrl.seeds import derive, generator
from async_flowrl.transfers import upload


def draw(batch: MicroBatch, seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Noise [B, ...] and x_t [B, ...] at the rows' own levels t = `batch.sigma`; float32.

    A function of `seeds` (one per row) and the batch alone, so that every adapter predicts at the same points.
    """
    device, shape = batch.latents.device, batch.latents.shape[1:]
    # Drawn on the CPU, so that a run gives the same numbers on every kind of device.
    sources = [generator(derive(seed, "noise")) for seed in seeds]
    noise = torch.stack([torch.randn(shape, generator=source, dtype=torch.float32) for source in sources])
    noise = upload(noise, device)
    weight = expand(batch.sigma.float(), noise)
    return noise, (1.0 - weight) * batch.latents.float() + weight * noise
