"""DiffusionNFT (arXiv 2509.16117): contrastive velocity regression on the forward process; no SDE, no log-probs."""

from collections.abc import Callable

import torch
from torch import Tensor

from async_flowrl.algorithms.advantage import GroupAdvantages
from async_flowrl.algorithms.base import LossOutput, MicroBatch, Prediction, Velocity
from async_flowrl.algorithms.forward import draw
from async_flowrl.algorithms.sde import expand, mean_over_latent
from async_flowrl.config.algorithm_schema import AlgorithmConfig
from async_flowrl.config.messages import unknown_name

MIN_WEIGHT = 1e-5
ADVANTAGE_MODES: dict[str, Callable[[Tensor], Tensor]] = {
    "continuous": lambda a: a,
    "positive_only": lambda a: a.clamp(min=0.0),
    "negative_only": lambda a: a.clamp(max=0.0),
    "one_only": lambda a: (a > 0.0).to(a.dtype),
    "binary": torch.sign,
}
"""The published code's `adv_mode`, applied to the clamped advantages."""


class DiffusionNFT(GroupAdvantages):
    """Pulls v towards the old policy's velocity for good images and away from it for bad ones.

    The old policy is the retained adapter of the version that generated the image, so stale samples need no correction.
    """

    name = "diffusion_nft"
    records = "final"
    predicts = reads = ("velocity", "noised")
    needs_behaviour = True
    vanishes_at_zero = False
    """At advantage 0 the two terms only cancel where v equals the old velocity; elsewhere they pull towards it."""

    def __init__(self, config: AlgorithmConfig, *, correction: str = "none") -> None:
        super().__init__(config)
        self.needs_reference = config.kl_coef > 0.0

    def predict(self, batch: MicroBatch, velocity: Velocity) -> Prediction:
        """velocity [B, ...] float32 at x_t, and x_t itself (noised [B, ...]), whose noise comes from `batch.seeds`."""
        _, noised = draw(batch, batch.seeds)
        return {"velocity": velocity(noised, batch.sigma), "noised": noised}

    def loss(
        self,
        batch: MicroBatch,
        current: Prediction,
        proximal: Prediction | None,
        behaviour: Prediction | None,
        reference: Prediction | None,
    ) -> LossOutput:
        """(r l(v+) + (1 - r) l(v-)) / beta · Amax + kl_coef · mean (v - v_ref)²; per row, float32 [B]."""
        if behaviour is None:
            raise ValueError("diffusion_nft needs the velocity of the policy that generated the sample, got none")
        new, old = current["velocity"].double(), behaviour["velocity"].detach().double()
        beta, bound = self.config.beta, self.config.adv_clip_max
        optimality = optimality_probability(batch.advantages, bound=bound, mode=self.config.advantage_mode)
        positive = reconstruction_loss(batch, current, old + beta * (new - old))
        negative = reconstruction_loss(batch, current, old - beta * (new - old))
        loss = (optimality * positive + (1.0 - optimality) * negative) / beta * bound
        ones = torch.ones_like(loss)
        metrics = {
            "kept": (batch.advantages != 0).double(),
            "nonzero": (batch.advantages != 0).double(),
            "positive_loss": positive.detach(),
            "negative_loss": negative.detach(),
            "old_deviation": mean_over_latent((new - old).detach().square()),
            "ratio": ones,
            "clip_fraction": 0.0 * ones,
            "log_prob_gap": 0.0 * ones,
        }
        if reference is not None:
            kl = mean_over_latent((new - reference["velocity"].double()).square())
            loss = loss + self.config.kl_coef * kl
            metrics["kl"] = kl.detach()
        return LossOutput(loss.float(), metrics)


def optimality_probability(advantages: Tensor, *, bound: float, mode: str = "continuous") -> Tensor:
    """r [B] float64 in [0, 1]: how good an image is among its group's, from its advantage [B] (any float).

    r = 1/2 + A / (2 bound), A the advantage clamped to ± `bound` and then changed by `mode` of ADVANTAGE_MODES:
    section 3.2 and `adv_mode` of the published code of DiffusionNFT (arXiv 2509.16117). ValueError for an unknown mode
    and a bound that is not above 0.
    """
    if mode not in ADVANTAGE_MODES:
        raise ValueError(unknown_name("mode", mode, ADVANTAGE_MODES))
    if not bound > 0:
        raise ValueError(f"bound must be above 0, got {bound}")
    clamped = ADVANTAGE_MODES[mode](advantages.double().clamp(-bound, bound))
    return (clamped / bound / 2.0 + 0.5).clamp(0.0, 1.0)


def reconstruction_loss(batch: MicroBatch, prediction: Prediction, velocity: Tensor) -> Tensor:
    """[B] float64: mean_D d² / w with d = (x_t - t v) - x0 and w = max(mean_D |d|, 1e-5), w without gradient."""
    time = expand(batch.sigma.double(), velocity)
    error = prediction["noised"].double() - time * velocity - batch.latents.double()
    weight = mean_over_latent(error.detach().abs()).clamp(min=MIN_WEIGHT)
    return mean_over_latent(error.square()) / weight
