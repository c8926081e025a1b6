"""The forward process x_t = (1 - t) x0 + t eps, for algorithms that train on final images."""

from collections.abc import Sequence

import torch
from torch import Tensor

from async_flowrl.algorithms.base import MicroBatch
from async_flowrl.algorithms.sde import expand
from async_flowrl.seeds import derive, generator
from async_flowrl.transfers import upload


def draw(batch: MicroBatch, seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Returns noise eps [B, ...] and x_t [B, ...] at the noise levels t = `batch.sigma` of the rows; both float32.

    They depend only on `seeds` (one per row) and the batch, so predictions under different weights use the same x_t.
    """
    device, shape = batch.latents.device, batch.latents.shape[1:]
    # The CPU draws, because generators of other devices would give other numbers.
    sources = [generator(derive(seed, "noise")) for seed in seeds]
    noise = torch.stack([torch.randn(shape, generator=source, dtype=torch.float32) for source in sources])
    noise = upload(noise, device)
    weight = expand(batch.sigma.float(), noise)
    return noise, (1.0 - weight) * batch.latents.float() + weight * noise
