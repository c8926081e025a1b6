"""The optimizer: AdamW on the flat vector of trained tensors, gradient clipping, and the learning-rate schedule."""

import logging
import math
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from async_flowrl.config.schema import TrainerConfig
from async_flowrl.training.flat import FlatParameters

logger = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq")
MIN_RMS_OVER_EPS = 10.0  # Below this ratio of the gradient's RMS to eps, Adam's steps are noticeably smaller.


class Optimizer:
    """AdamW (arXiv 1711.05101) with float32 weights and moments; `steps` is the number of steps taken.

    Of a model with experts, it steps each with a count of its own, and one whose gradient is zero not at all: neither
    momentum nor weight decay moves it.
    """

    def __init__(self, config: TrainerConfig, parameters: FlatParameters) -> None:
        self._config, self._parameters = config, parameters
        self._fused = parameters.values.device.type == "cuda"
        self._sections = parameters.sections()
        self._adam = torch.optim.AdamW(
            list(self._sections.values()),
            lr=config.learning_rate,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            weight_decay=config.weight_decay,
            # On CUDA it is a single kernel without temporary tensors; on a CPU it would change the rounding.
            fused=self._fused,
            foreach=False,
        )
        self.steps = 0
        self.stepped = 0  # Number of elements that the last step changed.
        self._warned = False

    def gradient_norms(self) -> dict[str, float]:
        """Returns the norm of the gradient of each expert by name; of a model without experts that of "", all of it."""
        return {name: self._parameters.norm(_gradient(section)) for name, section in self._sections.items()}

    def step(self, learning_rate: float, norms: Mapping[str, float]) -> dict[str, float]:
        """Clips the gradient, of these norms, together to max_grad_norm, makes a step, and returns metrics."""
        gradients, norm = self._parameters.gradients, math.hypot(*norms.values())
        if norm > self._config.max_grad_norm:
            gradients.mul_(self._config.max_grad_norm / norm)
        self._adam.param_groups[0]["lr"] = learning_rate
        kept = {name: _gradient(section) for name, section in self._sections.items()}
        for name, section in self._sections.items():
            if name and norms[name] == 0:
                section.grad = None
        self.stepped = sum(
            self._parameters.numel_of(name) for name, section in self._sections.items() if section.grad is not None
        )
        self._adam.step()
        for name, section in self._sections.items():
            section.grad = kept[name]
        self._parameters.changed()
        self.steps += 1
        rms = min(norm, self._config.max_grad_norm) / max(1, self.stepped) ** 0.5
        over_eps = rms / self._config.eps if self._config.eps > 0.0 else math.inf
        if over_eps < MIN_RMS_OVER_EPS and not self._warned:
            self._warned = True
            logger.warning(
                "trainer.eps=%g shrinks Adam's steps: the gradient's RMS is only %.3g times it; a smaller eps with a "
                "smaller learning rate would not depend on the scale of the loss",
                self._config.eps,
                over_eps,
            )
        of_experts = {f"grad_norm/{name}": value for name, value in norms.items() if name}
        return {"lr": learning_rate, "grad_norm": norm, **of_experts, "optimizer/rms_over_eps": over_eps}

    def state(self) -> dict[str, Tensor]:
        """Returns the moments for a checkpoint: `<moment>/<tensor name>` → float32 CPU tensor; {} before any step."""
        if not self._adam.state:
            return {}
        of_sections = [self._adam.state.get(section, {}) for section in self._sections.values()]
        return {
            f"{moment}/{name}": view
            for moment in MOMENTS
            for name, view in self._parameters.named(
                torch.cat(
                    [
                        kept[moment].to("cpu", copy=True) if kept else torch.zeros(section.shape)
                        for kept, section in zip(of_sections, self._sections.values(), strict=True)
                    ]
                )
            ).items()
        }

    @property
    def expert_steps(self) -> dict[str, int]:
        """Number of steps of each expert by name; {} for a model without experts."""
        taken = {name: self._adam.state.get(section, {}).get("step", 0) for name, section in self._sections.items()}
        return {name: int(steps) for name, steps in taken.items() if name}

    def load(self, tensors: Mapping[str, Tensor], steps: int, of_experts: Mapping[str, int]) -> None:
        """Restores the moments that `state` returned, and the numbers of steps. ValueError for other tensors."""
        self._adam.state.clear()
        self.steps = steps
        if not tensors:
            return
        for moment in MOMENTS:
            mine = {n.removeprefix(f"{moment}/"): t for n, t in tensors.items() if n.startswith(f"{moment}/")}
            whole = self._parameters.pack(mine, where=f"optimizer state {moment}")
            parts = torch.split(whole, [len(section) for section in self._sections.values()])
            for part, section in zip(parts, self._sections.values(), strict=True):
                self._adam.state[section][moment] = part
        for name, section in self._sections.items():
            # The fused kernel keeps its step counter on the device.
            count = torch.tensor(float(of_experts.get(name, steps)), device=section.device if self._fused else "cpu")
            self._adam.state[section]["step"] = count


def _gradient(section: Tensor) -> Tensor:
    return cast("Tensor", section.grad)


def step_over_lr(before: Tensor, parameters: FlatParameters, rate: float, stepped: int) -> float:
    """Returns RMS(weights - `before`) / learning rate over the `stepped` elements that a step changed.

    For Adam it is about 1 or less. It overwrites the gradient's memory.
    """
    change = torch.sub(parameters.values.data, before, out=parameters.gradients)
    length = parameters.norm(change)
    return length / (rate * math.sqrt(max(1, stepped)))


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
