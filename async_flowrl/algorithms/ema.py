"""Moving averages of trained weights: the EMA for evaluations, one to sample from, and one that losses compare with.

The trainer updates them after its optimizer steps.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from async_flowrl.config.schema import AlgorithmConfig

# `algorithm.old_policy_decay` and `average_decay` → decay d at the end of a batch, after `steps` optimizer steps in
# all, for old ← d · old + (1 - d) · new. `half` is the constant 0.5, which `slow` reaches after 500 steps; `copy`,
# `slow` and `late` are DiffusionNFT's schedules (arXiv 2509.16117, `return_decay` of its code), `quick` is that of AWM
# and DGPO, `rising` that of CRD.
DECAYS: dict[str, Callable[[int], float]] = {
    "copy": lambda steps: 0.0,
    "half": lambda steps: 0.5,
    "slow": lambda steps: min(0.001 * steps, 0.5),
    "quick": lambda steps: min(0.001 * steps, 0.3),
    "late": lambda steps: 0.0 if steps < 75 else min(0.0075 * (steps - 75), 0.999),
    "rising": lambda steps: min(0.25 + 0.005 * steps, 0.999),
}


def ema_decay(step: int, max_decay: float) -> float:
    """Returns the decay of the EMA after n = `step` optimizer steps: min((1 + n) / (10 + n), max_decay)."""
    # flow_grpo's code uses it with max_decay 0.9 after every 8th step.
    return min((1.0 + step) / (10.0 + step), max_decay)


# Algorithms that can sample from a moving average.
SAMPLED_FROM_AVERAGE = ("diffusion_nft", "crd")


def samples_from_average(config: AlgorithmConfig) -> bool:
    """Returns True if rollout workers sample from a moving average instead of the trained weights."""
    return config.name in SAMPLED_FROM_AVERAGE and config.old_policy_decay != "copy"


def kept_vectors(config: AlgorithmConfig) -> int:
    """Returns the number of copies of the trained weights in float32 that the algorithm keeps."""
    return samples_from_average(config) + (config.average_decay is not None) + (config.reference_every is not None)


@torch.no_grad()
def update_average(average: Iterable[Tensor], current: Iterable[Tensor], decay: float) -> None:
    """Sets average ← decay · average + (1 - decay) · current, in place, tensor by tensor; decay 0 copies exactly."""
    for old, new in zip(average, current, strict=True):
        if decay == 0.0:
            old.copy_(new)
        else:
            old.lerp_(new.to(old.dtype), 1.0 - decay)
