"""Base class of the algorithms that train on final images: random draws, predictions, penalties and metrics.

The trainer noises a final image x0 to level s, x_s = (1 - s) x0 + s eps, and the network predicts v; its target is u =
eps - x0. The levels are drawn per group (`window.draw_window`), the noise eps per image or per group, so every draw is
a function of (seed, step, group), of the image too if it has its own, and predictions under all weights share x_s.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from async_flowrl.algorithms.advantage import GroupAdvantages
from async_flowrl.algorithms.base import LossOutput, MicroBatch, Prediction, Velocity, draw
from async_flowrl.algorithms.sde import mean_over_latent
from async_flowrl.config.schema import AlgorithmConfig


class FinalImages(GroupAdvantages, ABC):
    """A subclass implements `objective`, and names in `predicts` the tensors that it uses."""

    name = ""
    records = "final"
    # Some of velocity, noised and error (see base.Prediction).
    predicts: Collection[str] = ("velocity", "noised")
    # Predictions besides `current` that the objective uses.
    uses: Collection[str] = ()
    vanishes_at_zero = True

    def __init__(self, config: AlgorithmConfig, *, correction: str = "none") -> None:
        super().__init__(config)
        self.reads = self.predicts
        self.needs = tuple(dict.fromkeys((*self.uses, *(("reference",) if config.kl_coef > 0.0 else ()))))

    def seeds(self, batch: MicroBatch) -> Sequence[int]:
        """Returns the seed of each row's noise [B]; by default each image has its own noise at each level."""
        return batch.seeds

    def predict(self, batch: MicroBatch, velocity: Velocity) -> Prediction:
        """Returns the tensors named in `predicts`, at x_s = `noised`, which is made with noise from `seeds`."""
        noise, noised = draw(batch, self.seeds(batch))
        predicted = velocity(noised, batch.sigma)
        tensors: Prediction = {"velocity": predicted, "noised": noised}
        if "error" in self.predicts:
            difference = predicted.double() - (noise - batch.latents.float()).double()
            tensors["error"] = mean_over_latent(difference.square())
        return {name: tensors[name] for name in self.predicts}  # type: ignore[literal-required, return-value]

    def loss(self, batch: MicroBatch, current: Prediction, frozen: Mapping[str, Prediction]) -> LossOutput:
        """Returns per row [B] float32: objective + kl_coef · mean (v - v_ref)²; and metrics."""
        if "velocity" in current:
            # Converted once, so that the gradients of objective and penalty meet in float64.
            current = {**current, "velocity": current["velocity"].double()}
        loss, metrics = self.objective(batch, current, frozen)
        ones, nonzero = torch.ones_like(loss), (batch.advantages != 0).double()
        unused = {"ratio": ones, "clip_fraction": 0.0 * ones, "log_prob_gap": 0.0 * ones}
        metrics = {"kept": nonzero, "nonzero": nonzero, **unused, **metrics}
        if self.config.kl_coef > 0.0:
            kl = distance(current, frozen["reference"])
            loss = loss + self.config.kl_coef * kl
            metrics["kl"] = kl.detach()
        return LossOutput(loss.float(), metrics)

    @abstractmethod
    def objective(
        self, batch: MicroBatch, current: Prediction, frozen: Mapping[str, Prediction]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss without penalties [B] float64, and metrics per row; `frozen` has those of `needs`."""


def distance(one: Prediction, other: Prediction) -> Tensor:
    """Returns the mean of (v - v_other)² over latent elements, [B] float64; `other` gets no gradient."""
    return mean_over_latent((one["velocity"].double() - other["velocity"].detach().double()).square())
