"""Comparison of training: a LoRA after export and import, and the log-probabilities that the trainer recomputes.

The imported LoRA runs in diffusers' own ("stock") pipeline.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from async_flowrl.algorithms.base import Algorithm
from async_flowrl.algorithms.registry import build_algorithm
from async_flowrl.check_model.denoising import denoised
from async_flowrl.check_model.embeddings import Branches
from async_flowrl.check_model.rows import Row, Tolerance, gap
from async_flowrl.check_model.stock import IMAGES, record
from async_flowrl.config.schema import Config
from async_flowrl.config.sections.tune import LoraConfig
from async_flowrl.generate import Settings
from async_flowrl.policies import lora_file
from async_flowrl.policies.base import Policy
from async_flowrl.policies.lora import add_lora, lora_parameters, reference_mode
from async_flowrl.policies.lora_apply import apply_lora
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.seeds import derive, generator
from async_flowrl.training.messages import GroupMeta
from async_flowrl.training.micro_batches import Group
from async_flowrl.types import TRAIN, Prompt, RolloutRequest, Sampling

LORA, REPLAY = "LoRA round trip", "replayed log-probs"
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


def compare_lora(
    policy: Policy,
    pipeline: Any,
    branches: Branches,
    settings: Settings,
    prompt: str,
    start: Tensor,
    allowed: Tolerance,
) -> Row:
    """Compares the policy with its LoRA to the stock pipeline with the exported file; removes the policy's LoRA."""
    bare = denoised_without(policy, branches, start, settings.sampling)
    ours = denoised(policy, branches, start, settings.sampling)[-1]
    tensors = {name: parameter.detach().cpu() for name, parameter in lora_parameters(policy.transformer).items()}
    pipeline.unload_lora_weights()
    with tempfile.TemporaryDirectory() as work:
        lora_file.save(Path(work), tensors, alpha=_CONFIG.alpha)
        apply_lora(pipeline, Path(work))
    theirs = record(pipeline, settings, prompt, start).after[-1]
    distance, moved = gap(ours, theirs), gap(ours, bare)
    if moved.relative <= allowed.relative:
        return Row(
            LORA, False, moved.difference, moved.relative, "the adapter changes nothing: is it on a dead branch?"
        )
    said = f"it moves the latents by {moved.difference:.2g}" if distance.relative <= allowed.relative else _LOST
    return Row(LORA, distance.relative <= allowed.relative, distance.difference, distance.relative, said)


_LOST = "the stock pipeline with the exported LoRA makes other latents: layers that it does not adapt, or another scale"


def denoised_without(policy: Policy, branches: Branches, start: Tensor, sampling: Sampling) -> Tensor:
    """Final latents with the LoRA switched off."""
    with reference_mode(policy.transformer):
        return denoised(policy, branches, start, sampling)[-1]


def compare_replay(policy: Policy, branches: Branches, sampling: Sampling, prompt: str, allowed: Tolerance) -> Row:
    """Compares log-probabilities of a noisy rollout to the trainer's, which takes all steps in one micro-batch."""
    noisy = replace(sampling, sde_type="sde", noise_level=0.7)
    device = next(iter(branches.positive.values())).device
    trajectory = DiffusersEngine(policy, device=device).generate(_request(noisy, prompt)).trajectory
    if trajectory is None:
        raise ValueError("the rollout recorded no trajectory")
    group = Group(_meta(noisy), [trajectory], device=device)
    algorithm, steps = _algorithm(noisy), len(trajectory.train_steps)
    (batch,) = group.micro_batches(algorithm.records, 0, samples=IMAGES, steps=steps)

    def velocity(latents: Tensor, sigma: Tensor) -> Tensor:
        return policy.velocity(latents, sigma, group.conditioning, branches.negative, noisy)

    log_prob = algorithm.predict(batch, velocity)["log_prob"]
    measured = gap(log_prob, batch.rollout_log_prob)
    holds = measured.difference <= allowed.nats
    said = "" if holds else "rows at different noise levels in one batch give other velocities than one level at a time"
    return Row(REPLAY, holds, measured.difference, measured.relative, said)


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
