"""Base class of the policy-gradient algorithms: prediction, correction for stale images, KL penalty, metrics.

The surrogate (the loss term with the probability ratio) compares the trained weights with the proximal policy, not with
the log-probs that the rollout recorded. All ratios are therefore exactly 1 at the first optimizer step of a batch, even
if the rollout engine computes slightly other log-probs than the trainer.

Divergences are the exact KL of two Gaussians of equal standard deviation. "Nats" means a sum over all latent elements;
other log-ratios and divergences are means over them.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from async_flowrl.algorithms import sde
from async_flowrl.algorithms.advantage import GroupAdvantages
from async_flowrl.algorithms.base import LossOutput, MicroBatch, Prediction, Velocity, detached
from async_flowrl.algorithms.window import possible_steps
from async_flowrl.config.schema import AlgorithmConfig
from async_flowrl.transfers import upload

# Log-ratios are clamped to ± this value before exp, because an overflow would give gradients of infinity × 0.
MAX_LOG_RATIO = 20.0
# `algorithm.correction`: importance weights from the log-probs that the rollout recorded. They correct for staleness
# and for differences between the engines, and need no behaviour prediction.
ROLLOUT_TIS = "rollout_tis"
# KL of an update in nats per latent element that stands for `algorithm.max_kl_per_update` where it is null; the bound
# of the glyphs recipe (docs/algorithms.md, trust region).
USUAL_KL_PER_ELEMENT = 0.3 / 1024
# Smallest std of a cps step; below it the density is so sharp that KL, weights and masks from it are useless.
MIN_GAUSSIAN_STD = 0.05


def divergence(mean: Tensor, other: Tensor, std: Tensor) -> Tensor:
    """Returns KL(N(mean, std²) || N(other, std²)) per latent element, [B] float64; both means are [B, ...], std [B]."""
    return sde.mean_over_latent((mean.double() - other.double()).square()) / (2.0 * std.double().square())


def ratio_of(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def divergence_mask(distance: Tensor, log_ratio: Tensor, advantages: Tensor, threshold: float) -> Tensor:
    """Returns [B] bool: False (dropped) for rows with distance >= threshold whose gradient makes |log_ratio| larger.

    All inputs are [B]; the mask is that of Flow-DPPO (arXiv 2606.11025).
    """
    moves_away = ((log_ratio > 0) & (advantages > 0)) | ((log_ratio < 0) & (advantages < 0))
    return ~((distance >= threshold) & moves_away)


def importance_weight(log_ratio_nats: Tensor, cap: float) -> Tensor:
    """Returns the truncated importance weight min(exp(log-ratio), cap) [B], without gradient; log-ratio [B] in nats."""
    return ratio_of(log_ratio_nats.detach()).clamp(max=cap)


def gap_metrics(log_ratio: Tensor) -> dict[str, Tensor]:
    """Returns metrics [B] of x = `log_ratio`: the proximal policy's log-prob minus the one that the rollout recorded.

    k2 = x² / 2 and k3 = exp(x) - 1 - x are the usual estimates of a KL divergence. All are per latent element.
    """
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "log_prob_gap": log_ratio.abs(),
        "rollout_log_ratio": log_ratio,
        "rollout_k2": log_ratio.square() / 2.0,
        "rollout_k3": torch.expm1(bounded) - bounded,
    }


def weight_metrics(log_ratio_nats: Tensor) -> dict[str, Tensor]:
    """Returns the importance weights [B] before truncation, and their squares, for `diagnostics.sample_size`."""
    weight = ratio_of(log_ratio_nats)
    return {"importance_weight": weight, "importance_weight_squared": weight.square()}


class Surrogate(NamedTuple):
    """The part of the loss that is special to an algorithm; all [B].

    `loss` is before importance weights and KL penalty, `ratio` that of the trained weights to the proximal policy;
    `outside` is True if it (flow_dppo: the divergence) is out of bounds, `survives` if the row's gradient is not cut.
    """

    loss: Tensor
    ratio: Tensor
    outside: Tensor
    survives: Tensor


class PolicyGradient(GroupAdvantages, ABC):
    """Base class of the algorithms that train on recorded noisy denoising steps; a subclass implements `surrogate`."""

    name = ""
    records = "transitions"
    predicts: Collection[str] = ("log_prob", "mean", "std")
    # True if the surrogate uses `mean` of the proximal policy's prediction.
    needs_proximal_mean = False
    # Default of `correction_threshold` ÷ KL of one update. `build_algorithm` sets it (`reach_of`, registry.py).
    reach = 1.0

    def __init__(self, config: AlgorithmConfig, *, correction: str) -> None:
        super().__init__(config)
        self.correction = correction
        corrected, penalised = correction in ("mask", "tis"), config.kl_coef > 0.0 and config.kl_form != "proximal"
        taught = config.teacher_coef > 0.0
        asked = {"proximal": True, "behaviour": corrected, "reference": penalised, "teacher": taught}
        self.needs: Collection[str] = tuple(name for name, needed in asked.items() if needed)
        self.vanishes_at_zero = config.kl_coef == 0.0 and not taught
        # True if `log_prob` is a log-density; False if it is the usual value for cps steps (see sde.log_prob).
        self.gaussian = config.sde_type != "cps" or uses_density(config, correction, self.needs_proximal_mean)
        self.reads = self._read()

    def predict(self, batch: MicroBatch, velocity: Velocity) -> Prediction:
        """Returns log_prob [B] float64 of the recorded step, and mean [B, ...] and std [B] of its Gaussian, float32."""
        step = sde.transition(
            batch.latents,
            velocity(batch.latents, batch.sigma),
            batch.sigma,
            batch.sigma_next,
            sigma_after_first=batch.sigmas[1],
            sde_type=self.config.sde_type,
            noise_level=self.config.noise_level,
        )
        if self.gaussian:
            value = sde.gaussian_log_prob(batch.next_latents, step)
        else:
            value = sde.log_prob(batch.next_latents, step, self.config.sde_type)
        return {"log_prob": value, "mean": step.mean, "std": step.std.flatten()}

    def loss(self, batch: MicroBatch, current: Prediction, frozen: Mapping[str, Prediction]) -> LossOutput:
        """Returns per row [B] float32: step weight · importance weight or mask · surrogate + kl_coef · KL; and metrics.

        A teacher adds teacher_coef · its KL, and policy_coef scales the surrogate alone. Without `proximal`, the
        detached current prediction is used. Without `behaviour` there is no mask, and importance weights only with
        correction=rollout_tis.
        """
        proximal, behaviour = frozen.get("proximal", detached(current)), frozen.get("behaviour")
        advantages = batch.advantages.double()
        surrogate = self.surrogate(batch, current, proximal)
        kept = surrogate.survives & (advantages != 0)
        since_rollout = proximal["log_prob"] - self._rollout_log_prob(batch, current)
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
        elif self.config.step_weight != "none":
            loss = loss * self._relative_weights(batch)
        if behaviour is None:
            weight_log = self._nats(since_rollout, batch, current)
            metrics |= weight_metrics(weight_log)
            if self.correction == ROLLOUT_TIS:
                loss = loss * importance_weight(weight_log, self.config.tis_cap)
        else:
            factor, more = self._corrected(batch, current, proximal, behaviour)
            loss, kept = loss * factor, kept & (factor != 0)
            metrics |= more
        metrics["kept"] = kept.double()
        for sign, rows in (("positive", advantages > 0), ("negative", advantages < 0)):
            metrics |= {f"kept_{sign}": (kept & rows).double(), f"rows_{sign}": rows.double()}
        if (teacher := frozen.get("teacher")) is not None:
            loss = self.config.policy_coef * loss
        if (kl := self._kl(batch, current, proximal, frozen.get("reference"))) is not None:
            loss = loss + self.config.kl_coef * kl
            metrics["kl"] = kl.detach()
        if teacher is not None:
            distance = divergence(current["mean"], teacher["mean"], current["std"])
            loss = loss + self.config.teacher_coef * distance
            metrics["teacher_kl"] = distance.detach()
        return LossOutput(loss.float(), metrics)

    def _relative_weights(self, batch: MicroBatch) -> Tensor:
        """Returns the weight of each row's step [B], relative to the mean over all steps that a window may contain."""
        config = self.config
        by_step = sde.relative_weights(
            config.step_weight,
            batch.sigmas,
            possible_steps(config, len(batch.sigmas) - 1),
            sde_type=config.sde_type,
            noise_level=config.noise_level,
        )
        return by_step[upload(batch.steps, by_step.device)]

    def moved(self, batch: MicroBatch, before: Prediction, after: Prediction) -> Tensor:
        """Returns the KL [B] float64 in nats per latent; the std of a step is the same under all weights."""
        return sde.latent_elements(batch.latents) * divergence(before["mean"], after["mean"], before["std"])

    def _read(self) -> Collection[str]:
        config = self.config
        distance = len(self.needs) > 1 or self.needs_proximal_mean
        if distance or config.max_kl_per_update is not None or config.kl_probe_images > 0:
            return ("log_prob", "mean", "std")
        scale = config.sde_type == "cps" or config.step_weight == "variance"
        return ("log_prob", "std") if scale else ("log_prob",)

    @abstractmethod
    def surrogate(self, batch: MicroBatch, current: Prediction, proximal: Prediction) -> Surrogate:
        """Returns the algorithm's surrogate; `proximal` is the prediction of the weights at the batch's start."""

    def clipped_advantages(self, batch: MicroBatch) -> Tensor:
        return batch.advantages.double().clamp(-self.config.adv_clip_max, self.config.adv_clip_max)

    def _rollout_log_prob(self, batch: MicroBatch, current: Prediction) -> Tensor:
        value = batch.rollout_log_prob.double()
        if self.config.sde_type != "cps" or not self.gaussian:
            return value
        return sde.cps_to_gaussian(value, current["std"])

    def _nats(self, log_ratio: Tensor, batch: MicroBatch, current: Prediction) -> Tensor:
        nats = log_ratio * sde.latent_elements(batch.latents)
        return nats if self.gaussian else nats / (2.0 * current["std"].double().square())

    def _corrected(
        self, batch: MicroBatch, current: Prediction, proximal: Prediction, behaviour: Prediction
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the factor [B] on the surrogate and metrics of the distance to the behaviour policy."""
        now = detached(current)
        elements = sde.latent_elements(batch.latents)
        distance = elements * divergence(now["mean"], behaviour["mean"], now["std"])
        moved = now["log_prob"] - behaviour["log_prob"]
        weight_log = self._nats(proximal["log_prob"] - behaviour["log_prob"], batch, current)
        keep = divergence_mask(distance, moved, batch.advantages, self.threshold(elements))
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

    def threshold(self, elements: int) -> float:
        """Returns the divergence in nats per denoising step at which the mask begins, for latents of `elements`."""
        if self.config.correction_threshold is not None:
            return self.config.correction_threshold
        return self.reach * (self.config.max_kl_per_update or USUAL_KL_PER_ELEMENT * elements)

    def _kl(
        self, batch: MicroBatch, current: Prediction, proximal: Prediction, reference: Prediction | None
    ) -> Tensor | None:
        """Returns the KL penalty [B] float64 per latent element, by `kl_form`; None without a penalty.

        exact: KL of the Gaussians. code: the same times sigma - sigma_next, as the published codes compute it.
        proximal: (l - l_proximal)² / 2 as in MixGRPO's code; it is 0 at the first optimizer step of a batch.
        """
        if self.config.kl_coef > 0.0 and self.config.kl_form == "proximal":
            return (current["log_prob"] - proximal["log_prob"]).square() / 2.0
        if reference is None:
            return None
        exact = divergence(current["mean"], reference["mean"], current["std"])
        # For cps steps the published codes use the full std, so both forms are equal.
        if self.config.kl_form == "exact" or self.config.sde_type == "cps":
            return exact
        return exact * (batch.sigma - batch.sigma_next).double()


def uses_density(config: AlgorithmConfig, correction: str, needs_proximal_mean: bool) -> bool:
    """Returns True if the loss needs a log-density: for KL, teacher, importance weights, divergence or clip in nats."""
    kl = (config.kl_coef > 0.0 and config.kl_form != "proximal") or config.teacher_coef > 0.0
    return kl or correction in ("mask", "tis", ROLLOUT_TIS) or config.clip_unit == "nats" or needs_proximal_mean
