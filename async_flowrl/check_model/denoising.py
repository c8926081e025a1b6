"""Comparison of schedule, velocity, latents and images with diffusers' own ("stock") pipeline, from its own inputs."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from async_flowrl.algorithms import sde
from async_flowrl.check_model.embeddings import Branches, compare_input, network_inputs
from async_flowrl.check_model.rows import Gap, Row, Tolerance, gap
from async_flowrl.check_model.stock import Stock, network_name
from async_flowrl.policies.base import Policy
from async_flowrl.types import Resolution, Sampling

SCHEDULE, VELOCITY, LATENTS, DECODE = "schedule", "velocity", "ODE latents", "decoded images"
_EULER = "FlowMatchEulerDiscreteScheduler"


def compare_schedule(policy: Policy, stock: Stock, sampling: Sampling, scheduler: Any, allowed: Tolerance) -> Row:
    """Compares the family's sigmas (noise levels) with those of the scheduler in the stock call."""
    ours = policy.sigmas(sampling.num_inference_steps, sampling.resolution)
    theirs = stock.sigmas
    if ours.shape != theirs.shape or len(stock.velocities) != len(ours) - 1:
        counts = f"the family has {len(ours) - 1} steps, the stock pipeline {len(stock.velocities)}"
        return Row(SCHEDULE, False, said=f"{counts} over {len(theirs)} sigmas")
    distance = gap(ours, theirs)
    if distance.difference <= allowed.relative:
        return Row(SCHEDULE, True, distance.difference, distance.relative)
    at = int((ours - theirs).abs().argmax())
    cause = _solver(scheduler) or "_set_schedule spaces or shifts otherwise than its __call__ does"
    said = f"sigmas[{at}] is {float(ours[at]):.4g}, the stock pipeline's {float(theirs[at]):.4g}: {cause}"
    return Row(SCHEDULE, False, distance.difference, distance.relative, said)


def compare_velocity(policy: Policy, branches: Branches, stock: Stock, sampling: Sampling, allowed: Tolerance) -> Row:
    """Compares the velocity, guidance included, at every step, from the stock pipeline's latents and noise level."""
    layout = policy.latent_shape(sampling.resolution)
    if (theirs := tuple(stock.before[0].shape[1:])) != tuple(layout):
        return Row(
            VELOCITY, False, said=f"the family's latents are {list(layout)}, the stock pipeline's {list(theirs)}"
        )
    worst, where, ours = Gap(0.0, 0.0), 0, Tensor()
    for step, (x, target) in enumerate(zip(stock.before, stock.velocities, strict=True)):
        sigma = stock.sigmas[step].to(x.device).expand(len(x))
        velocity = policy.velocity(x, sigma, branches.positive, branches.negative, sampling)
        if velocity.shape != target.shape:
            shapes = f"{list(velocity.shape)}, the stock pipeline's scheduler gets {list(target.shape)}"
            return Row(VELOCITY, False, said=f"the family's has the shape {shapes}")
        distance = gap(velocity, target)
        if step == 0 or distance.relative > worst.relative:
            worst, where, ours = distance, step, velocity
    if worst.relative <= allowed.relative:
        return Row(VELOCITY, True, worst.difference, worst.relative)
    cause = _factor(ours, stock.velocities[where], allowed) or _time(policy, branches.positive, stock, sampling)
    guided = " or _guide" if branches.negative is not None else ""
    said = f"at step {where}: {cause or f'_network{guided} is not what the stock pipeline does with its network'}"
    return Row(VELOCITY, False, worst.difference, worst.relative, said)


def _factor(ours: Tensor, theirs: Tensor, allowed: Tolerance) -> str | None:
    """Explains a velocity that is a constant multiple of the stock one; None if it is not."""
    one, other = ours.double().flatten(), theirs.double().flatten()
    factor = float(one @ other / (other @ other).clamp_min(1e-30))
    if abs(factor) < 1e-3 or gap(one, factor * other).relative > allowed.relative:
        return None
    advice = "; velocity is eps - x0, does the network predict x0 - eps?" if abs(factor + 1) < 1e-3 else ""
    return f"the family's is {factor:.4g} times the stock pipeline's{advice}"


def _time(policy: Policy, branch: Mapping[str, Tensor], stock: Stock, sampling: Sampling) -> str | None:
    """Explains a time argument of the network that differs from the stock one; None if it does not differ."""
    ours = network_inputs(policy, branch, stock, replace(sampling, true_cfg_scale=1.0))
    for name, value in ours.items():
        theirs = [call.get(name) for call in stock.network]
        compared = compare_input(value, theirs) if network_name(name) == "time" else Gap(0.0, 0.0)
        if isinstance(compared, Gap) and compared.difference > 1e-3 and isinstance(value, Tensor):
            other = next(float(each.flatten()[0]) for each in theirs if isinstance(each, Tensor))
            return f"the network is given {name}={float(value.flatten()[0]):.4g}, by the stock pipeline {other:.4g}"
    return None


def denoised(policy: Policy, branches: Branches, start: Tensor, sampling: Sampling) -> list[Tensor]:
    """Returns the latents after every step of deterministic sampling (ODE) with the family's schedule."""
    sigmas = policy.sigmas(sampling.num_inference_steps, sampling.resolution).to(start.device)
    x, latents = start, []
    for sigma, after in pairwise(sigmas):
        now = sigma.expand(len(x))
        velocity = policy.velocity(x, now, branches.positive, branches.negative, sampling)
        x = sde.ode_step(x, velocity, now, after.expand(len(x)))
        latents.append(x)
    return latents


def compare_latents(latents: list[Tensor], stock: Stock, scheduler: Any, allowed: Tolerance) -> Row:
    """Compares the latents after every step, the final ones included."""
    gaps = [gap(ours, theirs) for ours, theirs in zip(latents, stock.after, strict=True)]
    worst = max(gaps, key=lambda each: each.relative)
    if worst.relative <= allowed.relative:
        return Row(LATENTS, True, worst.difference, worst.relative)
    first = next(step for step, each in enumerate(gaps) if each.relative > allowed.relative)
    cause = _solver(scheduler)
    said = f"from step {first} on, the final ones by {gaps[-1].difference:.2g}{cause and f': {cause}'}"
    return Row(LATENTS, False, worst.difference, worst.relative, said)


def _solver(scheduler: Any) -> str:
    """Names the stock pipeline's scheduler if a run's sampling steps differ from it; otherwise an empty string."""
    kind = type(scheduler).__name__
    return "" if kind == _EULER else f"the stock pipeline steps with {kind}, a run steps as {_EULER} does"


def compare_images(policy: Policy, stock: Stock, resolution: Resolution, allowed: Tolerance) -> Row:
    """Compares the images decoded from the stock pipeline's final latents, in pixel levels of 0..255."""
    ours = policy.decode(stock.after[-1], resolution).cpu()
    theirs = torch.from_numpy(stock.images)
    if ours.shape != theirs.shape or ours.dtype != torch.uint8:
        shapes = f"{list(ours.shape)} {ours.dtype}, the stock pipeline's {list(theirs.shape)} torch.uint8"
        return Row(DECODE, False, said=f"the family's images are {shapes}")
    distance = gap(ours, theirs)
    holds = distance.difference <= allowed.levels
    said = "" if holds else "_decoded or _unpacked scales, shifts or unpacks the latents otherwise than its __call__"
    return Row(DECODE, holds, distance.difference, distance.relative, said)
