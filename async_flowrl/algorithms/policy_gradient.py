"""Base of the policy-gradient algorithms: prediction, correction for stale samples, KL to the reference, metrics.

The surrogate of each algorithm is centred on the proximal policy (the weights at the start of the batch), never on the
rollout engine's own numbers: at the start of an update every ratio is exactly 1, whatever engine sampled.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from async_flowrl.algorithms import sde
from async_flowrl.algorithms.advantage import GroupAdvantages
from async_flowrl.algorithms.base import LossOutput, MicroBatch, Prediction, Velocity, detached
from async_flowrl.algorithms.correction import (
    divergence,
    divergence_mask,
    gap_metrics,
    importance_weight,
    weight_metrics,
)
from async_flowrl.config.algorithm_schema import AlgorithmConfig

ROLLOUT_TIS = "rollout_tis"
"""Weights to the log-probs that the rollout recorded: age and engine differences together, without another pass."""
MIN_GAUSSIAN_STD = 0.05
"""cps steps with a smaller std have so sharp a density that KL, weights and masks made of it mean nothing."""


@dataclass(frozen=True)
class Surrogate:
    """All [B]: loss before weights and KL, ratio, whether the bounds were left, whether the gradient survives."""

    loss: Tensor
    ratio: Tensor
    outside: Tensor
    survives: Tensor


class PolicyGradient(GroupAdvantages, ABC):
    """Base of the algorithms that train on recorded noisy transitions; a subclass gives `surrogate`."""

    name = ""
    records = "transitions"
    predicts: Collection[str] = ("log_prob", "mean", "std")
    needs_proximal_mean = False
    """Whether the surrogate looks at the proximal policy's mean."""

    def __init__(self, config: AlgorithmConfig, *, correction: str) -> None:
        super().__init__(config)
        self.correction = correction
        self.needs_behaviour = correction in ("mask", "tis")
        self.needs_reference = config.kl_coef > 0.0 and config.kl_form != "proximal"
        self.vanishes_at_zero = config.kl_coef == 0.0
        self.gaussian = config.sde_type != "cps" or uses_density(config, correction, self.needs_proximal_mean)
        """False only for the cps log-prob of the field, which is not a log-density."""
        self.reads = self._read()

    def predict(self, batch: MicroBatch, velocity: Velocity) -> Prediction:
        """log_prob [B] float64 of the recorded transition, mean [B, ...] and std [B] float32 of its distribution."""
        step = self._transition(batch, velocity(batch.latents, batch.sigma))
        value = (
            sde.gaussian_log_prob(batch.next_latents, step)
            if self.gaussian
            else sde.log_prob(batch.next_latents, step, self.config.sde_type)
        )
        return {"log_prob": value, "mean": step.mean, "std": step.std.flatten()}

    def loss(
        self,
        batch: MicroBatch,
        current: Prediction,
        proximal: Prediction | None,
        behaviour: Prediction | None,
        reference: Prediction | None,
    ) -> LossOutput:
        """Per row: weight · keep · surrogate + kl_coef · KL, float32 [B]."""
        anchor = detached(current) if proximal is None else proximal
        advantages = batch.advantages.double()
        surrogate = self.surrogate(batch, current, anchor)
        kept = surrogate.survives & (advantages != 0)
        since_rollout = anchor["log_prob"] - self._rollout_log_prob(batch, current)
        metrics = {
            "ratio": surrogate.ratio.detach(),
            "ratio_deviation_squared": (surrogate.ratio.detach() - 1.0).square(),
            "clip_fraction": surrogate.outside.double(),
            "nonzero": (advantages != 0).double(),
            **gap_metrics(since_rollout),
        }
        loss = surrogate.loss
        if self.config.step_weight == "variance":
            loss = loss * current["std"].double().square()
        if behaviour is None:
            weight_log = self._nats(since_rollout, batch, current)
            metrics |= weight_metrics(weight_log)
            if self.correction == ROLLOUT_TIS:
                loss = loss * importance_weight(weight_log, self.config.tis_cap)
        else:
            factor, more = self._corrected(batch, current, anchor, behaviour)
            loss, kept = loss * factor, kept & (factor != 0)
            metrics |= more
        metrics["kept"] = kept.double()
        if (kl := self._kl(batch, current, anchor, reference)) is not None:
            loss = loss + self.config.kl_coef * kl
            metrics["kl"] = kl.detach()
        return LossOutput(loss.float(), metrics)

    def moved(self, batch: MicroBatch, before: Prediction, after: Prediction) -> Tensor:
        """[B] float64, nats of the whole latent; both predictions have the std of the step, which no weights change."""
        return sde.latent_elements(batch.latents) * divergence(before["mean"], after["mean"], before["std"])

    def _read(self) -> Collection[str]:
        config = self.config
        distance = self.needs_behaviour or self.needs_reference or self.needs_proximal_mean
        if distance or config.max_kl_per_update is not None or config.kl_probe_images > 0:
            return ("log_prob", "mean", "std")
        scale = config.sde_type == "cps" or config.step_weight == "variance"
        return ("log_prob", "std") if scale else ("log_prob",)

    @abstractmethod
    def surrogate(self, batch: MicroBatch, current: Prediction, anchor: Prediction) -> Surrogate:
        """The algorithm's own part; `anchor` is the proximal policy's prediction, without gradient."""

    def clipped_advantages(self, batch: MicroBatch) -> Tensor:
        """[B] float64."""
        return batch.advantages.double().clamp(-self.config.adv_clip_max, self.config.adv_clip_max)

    def _transition(self, batch: MicroBatch, velocity: Tensor) -> sde.Transition:
        return sde.transition(
            batch.latents,
            velocity,
            batch.sigma,
            batch.sigma_next,
            sigma_after_first=batch.sigmas[1],
            sde_type=self.config.sde_type,
            noise_level=self.config.noise_level,
        )

    def _rollout_log_prob(self, batch: MicroBatch, current: Prediction) -> Tensor:
        """[B] float64, the sampler's number in the form of ours (it records the field's form for cps)."""
        value = batch.rollout_log_prob.double()
        if self.config.sde_type != "cps" or not self.gaussian:
            return value
        return sde.cps_to_gaussian(value, current["std"])

    def _nats(self, log_ratio: Tensor, batch: MicroBatch, current: Prediction) -> Tensor:
        """The true log-ratio [B] of whole latents, from a difference of our log-probs (means over latent elements)."""
        nats = log_ratio * sde.latent_elements(batch.latents)
        return nats if self.gaussian else nats / (2.0 * current["std"].double().square())

    def _corrected(
        self, batch: MicroBatch, current: Prediction, anchor: Prediction, behaviour: Prediction
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Factor [B] on the surrogate (1 with correction=none) and metrics of the distance to the behaviour policy."""
        now = detached(current)
        elements = sde.latent_elements(batch.latents)
        distance = elements * divergence(now["mean"], behaviour["mean"], now["std"])
        moved = now["log_prob"] - behaviour["log_prob"]
        weight_log = self._nats(anchor["log_prob"] - behaviour["log_prob"], batch, current)
        keep = divergence_mask(distance, moved, batch.advantages, self.config.correction_threshold)
        metrics = {
            "behaviour_divergence": distance,
            "behaviour_log_ratio": weight_log,
            "masked": 1.0 - keep.double(),
            **weight_metrics(weight_log),
        }
        if self.correction == "mask":
            return keep.double(), metrics
        if self.correction == "tis":
            return importance_weight(weight_log, self.config.tis_cap), metrics
        return torch.ones_like(weight_log), metrics

    def _kl(
        self, batch: MicroBatch, current: Prediction, anchor: Prediction, reference: Prediction | None
    ) -> Tensor | None:
        """[B] float64 per latent element. exact: Gaussian KL. code: the codebases', whose std lacks sqrt(h).

        proximal: (l - l_proximal)² / 2, what MixGRPO's code calls KL; 0 at the first optimizer step of a batch.
        """
        if self.config.kl_coef > 0.0 and self.config.kl_form == "proximal":
            return (current["log_prob"] - anchor["log_prob"]).square() / 2.0
        if reference is None:
            return None
        exact = divergence(current["mean"], reference["mean"], current["std"])
        # The codebases' std of a cps step is the full one, so both forms agree there.
        if self.config.kl_form == "exact" or self.config.sde_type == "cps":
            return exact
        return exact * (batch.sigma - batch.sigma_next).double()


def check_density(std: float) -> None:
    """ValueError for a cps step so sharp that nothing should be made of its Gaussian density."""
    if std < MIN_GAUSSIAN_STD:
        raise ValueError(
            f"a cps step has std {std:.4f}; KL, correction, flow_dppo and clip_unit=nats need at least "
            f"{MIN_GAUSSIAN_STD}: end algorithm.sde_window_range earlier or raise algorithm.noise_level"
        )


def uses_density(config: AlgorithmConfig, correction: str, needs_proximal_mean: bool) -> bool:
    """Whether anything needs a true log-density: KL, importance weights, a divergence mask, or a clip in nats."""
    kl = config.kl_coef > 0.0 and config.kl_form != "proximal"
    return kl or correction in ("mask", "tis", ROLLOUT_TIS) or config.clip_unit == "nats" or needs_proximal_mean
