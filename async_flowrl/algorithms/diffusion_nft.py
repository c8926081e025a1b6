"""DiffusionNFT (arXiv 2509.16117): trains the velocity on final images with fresh noise, without SDE steps."""

from collections.abc import Callable

import torch
from torch import Tensor

from async_flowrl.algorithms.advantage import GroupAdvantages
from async_flowrl.algorithms.base import LossOutput, MicroBatch, Prediction, Velocity, draw
from async_flowrl.algorithms.sde import expand, mean_over_latent
from async_flowrl.config.schema import AlgorithmConfig

MIN_WEIGHT = 1e-5
# `algorithm.advantage_mode` → function of the clamped advantages [B]; `adv_mode` in the published code.
ADVANTAGE_MODES: dict[str, Callable[[Tensor], Tensor]] = {
    "continuous": lambda a: a,
    "positive_only": lambda a: a.clamp(min=0.0),
    "negative_only": lambda a: a.clamp(max=0.0),
    "one_only": lambda a: (a > 0.0).to(a.dtype),
    "binary": torch.sign,
}


class DiffusionNFT(GroupAdvantages):
    """Trains v+ = old + beta (new - old) to reconstruct good images, v- = old - beta (new - old) for bad ones.

    `new` is the velocity in training. `old` is the velocity of the policy that made the image, so stale images need no
    correction.
    """

    name = "diffusion_nft"
    records = "final"
    predicts = reads = ("velocity", "noised")
    needs_behaviour = True
    # With advantage 0 the gradient is zero only if the new velocity equals the old one; otherwise it pulls them
    # together.
    vanishes_at_zero = False

    def __init__(self, config: AlgorithmConfig, *, correction: str = "none") -> None:
        super().__init__(config)
        self.needs_reference = config.kl_coef > 0.0

    def predict(self, batch: MicroBatch, velocity: Velocity) -> Prediction:
        """Returns `noised` = x_t, made with noise from `batch.seeds`, and `velocity` at x_t; both float32 [B, ...]."""
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
        """Returns per row (r l(v+) + (1 - r) l(v-)) / beta · adv_clip_max + kl_coef · mean (v - v_ref)².

        r is `optimality_probability` and l is `reconstruction_loss`.
        """
        assert behaviour is not None, "needs_behaviour"
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
    """Returns r [B] float64 in [0, 1], the probability that an image is a good one, from its advantage [B].

    r = 1/2 + A / (2 bound), where A is the advantage clamped to ± `bound` and then changed by ADVANTAGE_MODES[mode]
    (DiffusionNFT, arXiv 2509.16117, section 3.2, and `adv_mode` in its code).
    """
    clamped = ADVANTAGE_MODES[mode](advantages.double().clamp(-bound, bound))
    return (clamped / bound / 2.0 + 0.5).clamp(0.0, 1.0)


def reconstruction_loss(batch: MicroBatch, prediction: Prediction, velocity: Tensor) -> Tensor:
    """Returns mean(d²) / w [B] float64 with d = (x_t - t · velocity) - x0 and w = max(mean |d|, 1e-5).

    Means are over the latent elements; w gets no gradient. x_t is `prediction["noised"]`.
    """
    time = expand(batch.sigma.double(), velocity)
    error = prediction["noised"].double() - time * velocity - batch.latents.double()
    weight = mean_over_latent(error.detach().abs()).clamp(min=MIN_WEIGHT)
    return mean_over_latent(error.square()) / weight
