"""DiffusionNFT (arXiv 2509.16117): trains the velocity on final images with fresh noise, without SDE steps."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from async_flowrl.algorithms.base import MicroBatch, Prediction
from async_flowrl.algorithms.final_images import FinalImages
from async_flowrl.algorithms.sde import expand, mean_over_latent

MIN_WEIGHT = 1e-5
# `algorithm.advantage_mode` → function of the clamped advantages [B]; `adv_mode` in the published code.
ADVANTAGE_MODES: dict[str, Callable[[Tensor], Tensor]] = {
    "continuous": lambda a: a,
    "positive_only": lambda a: a.clamp(min=0.0),
    "negative_only": lambda a: a.clamp(max=0.0),
    "one_only": lambda a: (a > 0.0).to(a.dtype),
    "binary": torch.sign,
}


class DiffusionNFT(FinalImages):
    """Trains v+ = old + beta (new - old) to reconstruct good images, v- = old - beta (new - old) for bad ones.

    `new` is the velocity in training. `old` is the velocity of the policy that made the image, so stale images need no
    correction.
    """

    name = "diffusion_nft"
    uses = ("behaviour",)
    # With advantage 0 the gradient is zero only if the new velocity equals the old one; otherwise it pulls them
    # together.
    vanishes_at_zero = False

    def objective(
        self, batch: MicroBatch, current: Prediction, frozen: Mapping[str, Prediction]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns per row (r l(v+) + (1 - r) l(v-)) / beta · adv_clip_max.

        r is `optimality_probability` and l is `reconstruction_loss`.
        """
        new, old = current["velocity"].double(), frozen["behaviour"]["velocity"].detach().double()
        beta, bound = self.config.beta, self.config.adv_clip_max
        optimality = optimality_probability(batch.advantages, bound=bound, mode=self.config.advantage_mode)
        positive = reconstruction_loss(batch, current, old + beta * (new - old))
        negative = reconstruction_loss(batch, current, old - beta * (new - old))
        loss = (optimality * positive + (1.0 - optimality) * negative) / beta * bound
        metrics = {
            "positive_loss": positive.detach(),
            "negative_loss": negative.detach(),
            "old_deviation": mean_over_latent((new - old).detach().square()),
        }
        return loss, metrics


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
