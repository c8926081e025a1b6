"""Tests of what every model family computes, against diffusers' pipelines; a new family is one more parameter."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from async_flowrl.config.schema import LoraConfig
from async_flowrl.policies.lora import add_lora, lora_modules, lora_parameters, reference_mode
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.registry import family_of
from async_flowrl.training.fsdp import checkpoint_blocks
from async_flowrl.types import Sampling
from tests.support.families import (
    NAMES,
    TEXT,
    TWO_AND_SLOW,
    N,
    adapted,
    conditioning,
    denoised,
    how,
    latents,
    model_config,
    on_white,
    pipeline_of,
    policy_of,
    stock_images,
)
from tests.support.tiny import randomise, save_lora
from tests.unit.rollout.trajectories import replay, replayed, trajectory_of

OWN_TIMES = ("qwen_image", "sd3", "sana", "z_image")
"""Families with an expression of their own for the network's time."""


def made(pipeline: Any, policy: PipelinePolicy, sampling: Sampling, output: str = "latent") -> Any:
    return stock_images(pipeline, policy, sampling, latents(policy), output)


@pytest.mark.extended
def test_the_exported_adapter_in_the_stock_pipeline_denoises_alike(
    policy: PipelinePolicy, pipeline: Any, family: str, tmp_path: Path
) -> None:
    """ODE parity and the export's round trip in one: without the adapter the latents are others."""
    sampling = how(family, cfg=4.0)
    save_lora(tmp_path, policy.transformer, alpha=10.0)
    untouched = made(pipeline, policy, sampling)
    pipeline.load_lora_weights(tmp_path)
    try:
        theirs = made(pipeline, policy, sampling)
    finally:
        pipeline.unload_lora_weights()
    guided = latents(policy), sampling, *conditioning(policy)
    ours, tolerance = denoised(policy, *guided, steps=6), 5e-5  # Roundings depend on the CPU; SANA's reach 3e-5.
    assert (theirs - ours).abs().max() < tolerance
    assert (untouched - ours).abs().max() > 0.05
    with reference_mode(policy.transformer):
        assert (denoised(policy, *guided, steps=6) - untouched).abs().max() < tolerance


@pytest.mark.extended
def test_images_are_the_pipelines(policy: PipelinePolicy, pipeline: Any, family: str) -> None:
    images = policy.decode(made(pipeline, policy, how(family)), 32).numpy()
    theirs = np.stack([np.asarray(on_white(image)) for image in made(pipeline, policy, how(family), "pil")])
    assert images.dtype == np.uint8 and images.shape == (N, 32, 32, 3)
    assert np.abs(images.astype(int) - theirs).max() <= 1
    assert images.std() > 10


def test_the_trainer_replays_a_trajectory(policy: PipelinePolicy, family: str) -> None:
    """The log-ratio is exactly 0 in the sampler's shapes and grad mode, and below 1e-6 row by row.

    Other kinds of noise, and no guidance: tests/unit/rollout/test_diffusers_engine.py.
    """
    sampling = replace(how(family, cfg=4.0, sde_type="cps", noise_level=0.7), resolution=(32, 64))
    _, negative = conditioning(policy)
    made = replayed(policy, sampling, negative=negative)
    assert made.images.shape == (3, 32, 64, 3)
    wrong = replay(policy, trajectory_of(made), replace(sampling, true_cfg_scale=3.0), negative)
    assert wrong.abs().max() > 1e-4


@pytest.mark.extended
def test_every_adapted_layer_has_a_gradient_and_every_excluded_one_has_none(family: str) -> None:
    policy = policy_of(family)
    exclude = policy.lora_exclude

    class Whole:
        lora_targets, lora_exclude, experts = policy.lora_targets, None, policy.experts

    add_lora(policy.transformer, LoraConfig(2, 16.0), Whole(), seed=0)  # type: ignore[arg-type]
    randomise(lora_parameters(policy.transformer))
    positive, negative = conditioning(policy)
    policy.velocity(
        latents(policy), torch.tensor([0.9, 0.5, 0.1]), positive, negative, how(family, cfg=3.0)
    ).square().sum().backward()
    dead = {name for name, layer in lora_modules(policy.transformer).items() if not moved(layer)}
    named = set(lora_modules(policy.transformer))
    assert dead == {name for name in named if exclude is not None and re.fullmatch(exclude, name)}
    assert len(dead) < len(named)


def moved(layer: nn.Module) -> bool:
    gradients = [p.grad for name, p in layer.named_parameters() if "lora_" in name]
    return all(g is not None and bool(g.abs().sum() > 0) for g in gradients)


def test_the_blocks_hold_nearly_everything_and_checkpointing_them_changes_nothing(family: str) -> None:
    policy = adapted(family)
    inside = {id(p) for block in policy.blocks for p in block.parameters()}
    left = [name for name, p in policy.transformer.named_parameters() if id(p) not in inside and "lora_" in name]
    assert left == []
    positive, negative = conditioning(policy)
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            checkpoint_blocks(policy, "full")
        policy.transformer.zero_grad(set_to_none=True)
        policy.velocity(latents(policy), torch.full((N,), 0.6), positive, negative, how(family)).sum().backward()
        gradients.append([p.grad for p in lora_parameters(policy.transformer).values()])
    assert any(grad is not None for grad in gradients[1])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True) if a is not None and b is not None)


@pytest.mark.parametrize("family", TWO_AND_SLOW, indirect=True)
def test_a_trainer_process_has_only_the_transformer_and_the_same_weights(family: str, policy: PipelinePolicy) -> None:
    part = policy_of(family, parts="transformer")
    assert part.latent_shape(32) == policy.latent_shape(32)
    base = dict(part.transformer.named_parameters())
    whole = {
        name.replace(".base_layer", ""): p for name, p in policy.transformer.named_parameters() if "lora_" not in name
    }
    assert base.keys() == whole.keys()
    assert all(torch.equal(base[name], whole[name]) for name in base)
    with pytest.raises(RuntimeError, match="cannot encode prompts"):
        part.encode([TEXT])
    with pytest.raises(RuntimeError, match="cannot decode images"):
        part.decode(latents(part), 32)


@pytest.mark.extended
def test_bfloat16_computes_there_and_returns_float32(plain: PipelinePolicy, family: str) -> None:
    half = policy_of(family, dtype="bfloat16")
    positive, _ = conditioning(plain)
    with torch.no_grad():
        found, exact = (
            p.velocity(latents(plain), torch.full((N,), 0.6), positive, None, how(family)) for p in (half, plain)
        )
    assert found.dtype == torch.float32
    assert 0 < (found - exact).abs().max() < 0.3


@pytest.mark.extended
@pytest.mark.parametrize(
    "family",
    [name if name in OWN_TIMES else pytest.param(name, marks=pytest.mark.slow) for name in NAMES],
    indirect=True,
)
def test_the_network_sees_the_stock_pipelines_times(family: str) -> None:
    """In bfloat16, where rounding 1000 sigma and dividing by 1000 is not always the rounded sigma. In float32, latents
    would differ (above)."""
    dtype, steps = torch.bfloat16, 25
    policy, pipeline = policy_of(family, dtype="bfloat16"), pipeline_of(family).to(dtype)
    seen: dict[str, list[Tensor]] = {"theirs": [], "ours": []}

    def listening(name: str) -> Any:
        def heard(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[name].append(kwargs.get("timestep", args[1] if len(args) > 1 else None)[0].to(dtype))

        return heard

    policy.transformer.register_forward_pre_hook(listening("ours"), with_kwargs=True)
    pipeline.transformer.register_forward_pre_hook(listening("theirs"), with_kwargs=True)
    length = model_config(family).max_sequence_length
    texts = {} if length is None else {"max_sequence_length": length}
    options = family_of(pipeline).guidance_arguments(how(family)) | texts
    options |= {"use_resolution_binning": False} if family == "sana" else {}  # or it makes 1024 x 1024 pixels
    pipeline(prompt=TEXT, height=32, width=32, num_inference_steps=steps, output_type="latent", **options)
    positive, _ = conditioning(policy)
    with torch.no_grad():
        for sigma in policy.sigmas(steps, 32)[:-1]:
            policy.velocity(latents(policy), sigma.expand(N), positive, None, how(family))
    assert len(seen["ours"]) == len(seen["theirs"]) == steps
    assert all(torch.equal(one, other) for one, other in zip(*seen.values(), strict=True))
