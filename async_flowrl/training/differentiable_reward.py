"""The reward of latents in the trainer, with its gradient: the VAE and the rewards of `reward.terms`."""

from collections.abc import Callable

import torch
from torch import Tensor

from async_flowrl.config.schema import Config
from async_flowrl.policies.registry import ResolvedModel, load_policy
from async_flowrl.rewards.registry import differentiable_terms
from async_flowrl.training.messages import GroupMeta


class DifferentiableReward:
    """The weighted sum of the rewards of a group's images, as the reward workers score them but for rounding to bytes.

    The VAE and the networks of the rewards lie on the trainer's device beside the model, each on every rank.
    """

    def __init__(self, config: Config, model: ResolvedModel, device: torch.device) -> None:
        self._terms = differentiable_terms(config.reward)
        self._policy = load_policy(model, dtype=model.dtype, device=device, parts="vae")

    def of(self, meta: GroupMeta) -> Callable[[Tensor], Tensor]:
        """Returns the function from final latents [B, ...] of the group's prompt to their reward [B] float32."""
        prompt, resolution = meta.prompt, meta.sampling.resolution
        if prompt is None:
            raise ValueError(f"group {meta.group} came without its prompt, which the reward needs")

        def score(latents: Tensor) -> Tensor:
            images = self._policy.pixels(latents, resolution)
            scores = [weight * of_tensor(images, prompt).to(latents.device) for weight, of_tensor in self._terms]
            return torch.stack(scores).sum(dim=0)

        return score
