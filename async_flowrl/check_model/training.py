"""Training as `compare` needs it: a LoRA with random weights, its export, and log-probabilities computed twice."""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from async_flowrl.algorithms.base import Algorithm
from async_flowrl.algorithms.registry import build_algorithm
from async_flowrl.check_model.rows import IMAGES
from async_flowrl.config.schema import Config
from async_flowrl.config.sections.tune import LoraConfig
from async_flowrl.policies import lora_file
from async_flowrl.policies.base import Policy
from async_flowrl.policies.lora import add_lora, lora_parameters
from async_flowrl.policies.lora_apply import apply_lora
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.seeds import derive, generator
from async_flowrl.training.messages import GroupMeta
from async_flowrl.training.micro_batches import Group
from async_flowrl.types import TRAIN, Prompt, RolloutRequest, Sampling

_CONFIG = LoraConfig(rank=4, alpha=10.0)
"""Alpha differs from the rank, so that a scale lost during export is noticed."""
_STRENGTH = 0.05


def adapt(policy: Policy) -> None:
    """Adds a LoRA with random weights to the policy's network, so that it changes the output."""
    add_lora(policy.transformer, _CONFIG, policy, seed=0)
    with torch.no_grad():
        for name, parameter in lora_parameters(policy.transformer).items():
            if ".lora_B." in name:
                drawn = torch.randn(parameter.shape, generator=generator(derive(1, name)))
                parameter.copy_(_STRENGTH * drawn)


def move_to_pipeline(policy: Policy, pipeline: Any) -> None:
    """Exports the policy's LoRA to a file and loads that into the pipeline, whose network is the policy's."""
    tensors = {name: parameter.detach().cpu() for name, parameter in lora_parameters(policy.transformer).items()}
    pipeline.unload_lora_weights()
    with tempfile.TemporaryDirectory() as work:
        lora_file.save(Path(work), tensors, alpha=_CONFIG.alpha)
        apply_lora(pipeline, Path(work))


def log_probs(
    policy: Policy, negative: Mapping[str, Tensor] | None, sampling: Sampling, prompt: str, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns the log-probabilities that the trainer computes, all steps in one micro-batch, and a noisy rollout's."""
    noisy = replace(sampling, sde_type="sde", noise_level=0.7)
    trajectory = DiffusersEngine(policy, device=device).generate(_request(noisy, prompt)).trajectory
    if trajectory is None:
        raise ValueError("the rollout recorded no trajectory")
    group = Group(_meta(noisy), [trajectory], device=device)
    algorithm, steps = _algorithm(noisy), len(trajectory.train_steps)
    (batch,) = group.micro_batches(algorithm.records, 0, samples=IMAGES, steps=steps)

    def velocity(latents: Tensor, sigma: Tensor) -> Tensor:
        return policy.velocity(latents, sigma, group.conditioning, negative, noisy)

    return algorithm.predict(batch, velocity)["log_prob"], batch.rollout_log_prob


def _algorithm(noisy: Sampling) -> Algorithm:
    config = Config()
    algorithm = replace(config.algorithm, sde_type=noisy.sde_type, noise_level=noisy.noise_level)
    rollout = replace(config.rollout, num_inference_steps=noisy.num_inference_steps)
    return build_algorithm(replace(config, algorithm=algorithm, rollout=rollout))


def _meta(noisy: Sampling) -> GroupMeta:
    images = tuple(range(IMAGES))
    advantages = tuple(1.0 for _ in images)
    return GroupMeta(0, 1, 0, 0, advantages, images, images, noisy.negative_prompt, noisy)


def _request(noisy: Sampling, prompt: str) -> RolloutRequest:
    """Request of a rollout with noise at every step except the last."""
    images, steps = tuple(range(IMAGES)), tuple(range(noisy.num_inference_steps - 1))
    initial, noise = (tuple(derive(0, name, image) for image in images) for name in ("initial", "noise"))
    return RolloutRequest(
        kind=TRAIN,
        ordinal=0,
        step=0,
        group=0,
        version=0,
        prompt=Prompt(0, prompt),
        images=images,
        initial_seeds=initial,
        noise_seeds=noise,
        noise_steps=steps,
        train_steps=steps,
        sampling=noisy,
    )
