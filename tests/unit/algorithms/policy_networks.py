"""Small networks whose outputs stand for a policy's statistics, and losses of them."""

import math
from typing import Any

import torch
from torch import Tensor

from async_flowrl.algorithms.base import MicroBatch
from tests.unit.algorithms.algorithm_cases import SIGMAS, Network, frozen, nudged

STEPS = [0, 1, 2, 3, 0, 1, 2, 3]

ADVANTAGES = [1.0, -1.0, 0.4, -0.3, -2.0, 7.0, 0.0, 0.9]

D = 12


def statistics(network: Network, batch: MicroBatch, row: int, a: float) -> tuple[Tensor, Tensor, float]:
    """(log density mean over D, mean, std) of one row under `sde`, float64, from the score form of the step."""
    s, s_next = SIGMAS[STEPS[row]], SIGMAS[STEPS[row] + 1]
    x, after = batch.latents[row].double(), batch.next_latents[row].double()
    v = torch.tanh(x @ network.w.double() + s * network.u.double())
    h, g = s - s_next, a * math.sqrt(s / (1 - (SIGMAS[1] if s == 1 else s)))
    mean = x - h * v - 0.5 * g**2 * h * (x + (1 - s) * v) / s
    std = g * math.sqrt(h)
    return torch.distributions.Normal(mean, std).log_prob(after).mean(), mean, std


def networks() -> dict[str, Network]:
    current = Network(3, seed=1)
    return {
        "current": current,
        "proximal": nudged(current, 0.02, seed=5),
        "behaviour": nudged(current, 0.06, seed=6),
        "reference": nudged(current, 0.2, seed=7),
    }


def ours(algorithm: Any, batch: MicroBatch, nets: dict[str, Network], **without: None) -> Any:
    names = [name for name in algorithm.needs if name not in without]
    frozen_ones = {name: algorithm.predict(batch, frozen(nets[name])) for name in names}
    return algorithm.loss(batch, algorithm.predict(batch, nets["current"]), frozen_ones)
