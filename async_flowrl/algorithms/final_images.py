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
from async_flowrl.algorithms.base import LossOutput, MicroBatch, Prediction, Velocity, check_tuples, draw
from async_flowrl.algorithms.flow_grpo import clipped_surrogate
from async_flowrl.algorithms.sde import mean_over_latent
from async_flowrl.config.error_text import unknown_name
from async_flowrl.config.schema import AlgorithmConfig

MIN_DEVIATION = 1e-5
PREDICTED = ("velocity", "noised", "noise", "error", "deviation")  # What `predict` can give (see base.Prediction).


class FinalImages(GroupAdvantages, ABC):
    """A subclass implements `objective`, and names in `predicts` the tensors that it uses."""

    name = ""
    records = "final"
    predicts: Collection[str] = ("velocity", "noised")  # Some of PREDICTED.
    # Predictions besides `current` that the objective uses.
    uses: Collection[str] = ()
    vanishes_at_zero = True

    def __init__(self, config: AlgorithmConfig, *, correction: str = "none") -> None:
        super().__init__(config)
        check_tuples(self, ("predicts", "uses"))
        self.reads = self.predicts
        if type(self).predict is FinalImages.predict and (wrong := set(self.predicts).difference(PREDICTED)):
            raise ValueError(unknown_name("each of `predicts`", min(wrong), PREDICTED))
        # Name of the prediction that v stays near → the metric of the mean (v - v_name)², and its coefficient.
        self.penalties = {
            "reference": ("kl", config.kl_coef),
            "average": ("average_kl", config.average_coef),
            "teacher": ("teacher_kl", config.teacher_coef),
        }
        penalised = [name for name, (_, coefficient) in self.penalties.items() if coefficient > 0.0]
        self.needs = tuple(dict.fromkeys((*self.uses, *penalised)))
        self.vanishes_at_zero = self.vanishes_at_zero and not penalised

    def seeds(self, batch: MicroBatch) -> Sequence[int]:
        """Returns the seed of each row's noise [B]; by default each image has its own noise at each level."""
        return batch.seeds

    def predict(self, batch: MicroBatch, velocity: Velocity) -> Prediction:
        """Returns the tensors named in `predicts`, at x_s = `noised`, which is made with noise from `seeds`."""
        noise, noised = draw(batch, self.seeds(batch))
        predicted = velocity(noised, batch.sigma)
        tensors: Prediction = {"velocity": predicted, "noised": noised, "noise": noise}
        if "error" in self.predicts:
            difference = predicted.double() - (noise - batch.latents.float()).double()
            tensors["error"] = mean_over_latent(difference.square())
            tensors["deviation"] = mean_over_latent(difference.detach().abs()).clamp(min=MIN_DEVIATION)
        return {name: tensors[name] for name in self.predicts}  # type: ignore[literal-required, return-value]

    def loss(self, batch: MicroBatch, current: Prediction, frozen: Mapping[str, Prediction]) -> LossOutput:
        """Returns policy_coef · objective + coefficient · mean (v - v_name)² of all `penalties`, per row; metrics."""
        if "velocity" in current:
            # Converted once, so that the gradients of objective and penalty meet in float64.
            current = {**current, "velocity": current["velocity"].double()}
        loss, metrics = self.objective(batch, current, frozen)
        ones, nonzero = torch.ones_like(loss), (batch.advantages != 0).double()
        unused = {"ratio": ones, "clip_fraction": 0.0 * ones, "log_prob_gap": 0.0 * ones}
        metrics = {"kept": nonzero, "nonzero": nonzero, **unused, **metrics}
        if "teacher" in frozen:
            loss = self.config.policy_coef * loss
        for name, (metric, coefficient) in self.penalties.items():
            if coefficient > 0.0 and name in frozen:
                kl = distance(current, frozen[name])
                loss = loss + coefficient * (kl if name in ("average", "teacher") else self.penalty_weight(batch) * kl)
                metrics[metric] = kl.detach()
        return LossOutput(loss.float(), metrics)

    def penalty_weight(self, batch: MicroBatch) -> Tensor | float:
        """Returns the factor on the penalty of `kl_coef`, per row [B] if it is no constant."""
        return 1.0

    @abstractmethod
    def objective(
        self, batch: MicroBatch, current: Prediction, frozen: Mapping[str, Prediction]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss without penalties [B] float64, and metrics per row; `frozen` has those of `needs`."""


def bounded_advantages(advantages: Tensor, config: AlgorithmConfig) -> Tensor:
    """Returns the advantages [B] float64, bounded by ± adv_clip_max as `adv_clip` says."""
    bound, values = config.adv_clip_max, advantages.double()
    return bound * torch.tanh(values / bound) if config.adv_clip == "tanh" else values.clamp(-bound, bound)


def clipped(ratio: Tensor, advantages: Tensor, clip_range: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns PPO's loss max(-A · ratio, -A · clip(ratio, 1 ± clip_range)) and its metrics; all [B]."""
    clip = torch.full_like(ratio, clip_range)
    result = clipped_surrogate(ratio, advantages, 1.0 - clip, 1.0 + clip)
    kept, outside = result.survives & (advantages != 0), result.outside
    return result.loss, {"ratio": ratio.detach(), "clip_fraction": outside.double(), "kept": kept.double()}


def distance(one: Prediction, other: Prediction) -> Tensor:
    """Returns the mean of (v - v_other)² over latent elements, [B] float64; `other` gets no gradient."""
    return mean_over_latent((one["velocity"].double() - other["velocity"].detach().double()).square())
