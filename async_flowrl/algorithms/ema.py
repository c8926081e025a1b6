"""Moving averages of trainable weights: the EMA used for evaluation, and the old policy DiffusionNFT samples from."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

OLD_POLICY_DECAYS: dict[str, Callable[[int], float]] = {
    "copy": lambda step: 0.0,
    "half": lambda step: 0.5,
    "slow": lambda step: min(0.001 * step, 0.5),
    "late": lambda step: 0.0 if step < 75 else min(0.0075 * (step - 75), 0.999),
}
"""Decay of the old policy after update `step`, from 0. `half` is the bound of `slow` from the first step on; the others
are DiffusionNFT's published schedules (arXiv 2509.16117)."""


def ema_decay(step: int, max_decay: float) -> float:
    """min((1 + n) / (10 + n), max_decay) after n optimizer steps; flow_grpo uses max_decay 0.9, every 8 steps."""
    return min((1.0 + step) / (10.0 + step), max_decay)


def old_policy_decay(name: str, step: int) -> float:
    """Share of the old policy that stays after update `step`: old <- d old + (1 - d) new."""
    return OLD_POLICY_DECAYS[name](step)


def samples_from_average(algorithm: str, schedule: str) -> bool:
    """Whether rollouts sample from a slowly moving copy (their own weight stream) and not from the trained weights."""
    return algorithm == "diffusion_nft" and schedule != "copy"


@torch.no_grad()
def update_average(average: Iterable[Tensor], current: Iterable[Tensor], decay: float) -> None:
    """average <- decay average + (1 - decay) current, in place. decay 0 copies bit for bit, decay 1 changes nothing."""
    for old, new in zip(average, current, strict=True):
        if decay == 0.0:
            old.copy_(new)
        else:
            old.lerp_(new.to(old.dtype), 1.0 - decay)


def rms_over_eps(grad_rms: float, eps: float) -> float:
    """How far Adam's eps is from mattering; below about 10 eps is a hidden cut of the learning rate."""
    return grad_rms / eps if eps > 0.0 else float("inf")
