"""The optimizer: AdamW on the flat vector of trained tensors, gradient clipping, and the learning-rate schedule."""

import logging
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from async_flowrl.config.schema import TrainerConfig
from async_flowrl.training.flat import FlatParameters

logger = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq")
MIN_RMS_OVER_EPS = 10.0  # Below this ratio of the gradient's RMS to eps, Adam's steps are noticeably smaller.


class Optimizer:
    """AdamW (arXiv 1711.05101) with float32 weights and moments; `steps` is the number of steps taken."""

    def __init__(self, config: TrainerConfig, parameters: FlatParameters) -> None:
        self._config, self._parameters = config, parameters
        self._fused = parameters.values.device.type == "cuda"
        self._adam = torch.optim.AdamW(
            [parameters.values],
            lr=config.learning_rate,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            weight_decay=config.weight_decay,
            # On CUDA it is a single kernel without temporary tensors; on a CPU it would change the rounding.
            fused=self._fused,
            foreach=False,
        )
        self.steps = 0
        self._warned = False

    def gradient_norm(self) -> float:
        return self._parameters.norm(self._parameters.gradients)

    def step(self, learning_rate: float, norm: float) -> dict[str, float]:
        """Clips the gradient, whose norm is `norm`, to max_grad_norm, makes a step, and returns metrics."""
        gradients = self._parameters.gradients
        if norm > self._config.max_grad_norm:
            gradients.mul_(self._config.max_grad_norm / norm)
        self._adam.param_groups[0]["lr"] = learning_rate
        self._adam.step()
        self._parameters.changed()
        self.steps += 1
        rms = min(norm, self._config.max_grad_norm) / self._parameters.numel**0.5
        over_eps = rms / self._config.eps if self._config.eps > 0.0 else math.inf
        if over_eps < MIN_RMS_OVER_EPS and not self._warned:
            self._warned = True
            logger.warning(
                "trainer.eps=%g shrinks Adam's steps: the gradient's RMS is only %.3g times it; a smaller eps with a "
                "smaller learning rate would not depend on the scale of the loss",
                self._config.eps,
                over_eps,
            )
        return {"lr": learning_rate, "grad_norm": norm, "optimizer/rms_over_eps": over_eps}

    def state(self) -> dict[str, Tensor]:
        """Returns the moments for a checkpoint: `<moment>/<tensor name>` → float32 CPU tensor; {} before any step."""
        kept = self._adam.state.get(self._parameters.values)
        if not kept:
            return {}
        return {
            f"{moment}/{name}": view
            for moment in MOMENTS
            for name, view in self._parameters.named(kept[moment].to("cpu", copy=True)).items()
        }

    def load(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Restores the moments that `state` returned, and the number of steps. ValueError for other tensors."""
        self._adam.state.clear()
        self.steps = steps
        if not tensors:
            return
        kept = self._adam.state[self._parameters.values]
        # The fused kernel keeps its step counter on the device.
        kept["step"] = torch.tensor(float(steps), device=self._parameters.values.device if self._fused else "cpu")
        for moment in MOMENTS:
            mine = {n.removeprefix(f"{moment}/"): t for n, t in tensors.items() if n.startswith(f"{moment}/")}
            kept[moment] = self._parameters.pack(mine, where=f"optimizer state {moment}")


def step_over_lr(before: Tensor, parameters: FlatParameters, rate: float) -> float:
    """Returns RMS(weights - `before`) / learning rate, for Adam about 1 or less; overwrites the gradient's memory."""
    change = torch.sub(parameters.values.data, before, out=parameters.gradients)
    length = parameters.norm(change)
    return length / (rate * math.sqrt(parameters.numel))


def learning_rate(config: TrainerConfig, step: int, total_steps: int) -> float:
    """Returns the learning rate of training step `step` (from 0): linear warm-up, then constant, linear or cosine."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.learning_rate
    done = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    if config.lr_schedule == "linear":
        return config.learning_rate * max(0.0, 1.0 - done)
    return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
