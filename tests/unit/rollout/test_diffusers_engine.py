"""Tests of the rollout engine: repeatable, one seed per image, noise only in the window, exact replay."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from torch import Tensor

from async_flowrl.config.schema import ModelConfig
from async_flowrl.policies.lora import lora_parameters
from async_flowrl.policies.qwen_image import QwenImagePolicy
from async_flowrl.policies.registry import resolve_model
from async_flowrl.rollout.base import Rollout
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.seeds import derive, generator
from async_flowrl.types import EVALUATION, Prompt, RolloutRequest, Sampling, Trajectory
from tests.support.shared_models import SharedModels
from tests.support.tiny import RED, adapted_policy, request, sampling, tensors
from tests.unit.rollout.trajectories import replay, trajectory_of


def same(one: Rollout, two: Rollout) -> bool:
    a, b = trajectory_of(one), trajectory_of(two)
    return (
        np.array_equal(one.images, two.images)
        and np.array_equal(a.latents, b.latents)
        and np.array_equal(a.log_probs, b.log_probs)
    )


def test_the_same_request_gives_the_same_bits_from_another_engine(engine: DiffusersEngine) -> None:
    first = engine.generate([request(4)])[0]
    assert first.images.shape == (4, 32, 32, 3) and first.images.dtype == np.uint8
    torch.rand(7)
    assert same(first, engine.generate([request(4)])[0])
    assert same(first, DiffusersEngine(adapted_policy()).generate([request(4)])[0])


def test_chunks_change_only_the_last_float_bits(policy: QwenImagePolicy) -> None:
    whole = DiffusersEngine(policy).generate([request(5)])[0]
    chunked = DiffusersEngine(policy, batch_size=2).generate([request(5)])[0]
    a, b = trajectory_of(whole), trajectory_of(chunked)
    assert a.latents.shape == b.latents.shape == (5, 6, 4, 64)
    assert np.abs(a.latents - b.latents).max() < 1e-4
    assert np.abs(whole.images.astype(int) - chunked.images).max() <= 1
    assert same(chunked, DiffusersEngine(policy, batch_size=2).generate([request(5)])[0])


def test_an_image_depends_on_its_own_seeds(engine: DiffusersEngine) -> None:
    base = trajectory_of(engine.generate([request(3)])[0]).latents
    other_start = replace(request(3), initial_seeds=(*request(3).initial_seeds[:2], 99))
    other_noise = replace(request(3), noise_seeds=(*request(3).noise_seeds[:2], 99))
    started = trajectory_of(engine.generate([other_start])[0]).latents
    assert np.array_equal(started[:2, 0], base[:2, 0]) and not np.array_equal(started[2, 0], base[2, 0])
    noised = trajectory_of(engine.generate([other_noise])[0]).latents
    assert np.array_equal(noised[:, 0], base[:, 0])
    assert np.array_equal(noised[:2], base[:2])
    assert np.abs(noised[2, 1] - base[2, 1]).max() > 0.1
    drawn = torch.randn(4, 64, generator=generator(request(3).initial_seeds[1]))
    assert np.array_equal(base[1, 0], drawn.numpy())


def test_noise_falls_only_on_the_noise_steps(policy: QwenImagePolicy, engine: DiffusersEngine) -> None:
    """Two images from one start separate exactly at the first noisy step, and share their path up to there."""
    twins = replace(request(2, noise_steps=(1, 2, 3)), initial_seeds=(5, 5))
    found = trajectory_of(engine.generate([twins])[0])
    assert found.points == (1, 2, 3, 4) and found.train_steps == (1, 2, 3)
    assert np.abs(found.latents[0, 0] - found.latents[1, 0]).max() < 1e-6
    assert np.abs(found.latents[0, 1] - found.latents[1, 1]).max() > 0.1
    without = replace(twins, noise_steps=(), train_steps=(), kind=EVALUATION)
    images = engine.generate([without])[0].images
    assert np.abs(images[0].astype(int) - images[1]).max() <= 1


def test_without_trained_steps_the_final_latents_are_recorded(policy: QwenImagePolicy, engine: DiffusersEngine) -> None:
    rollout = engine.generate([request(2, noise_steps=())])[0]
    found = trajectory_of(rollout)
    assert found.points == (6,) and found.latents.shape == (2, 1, 4, 64) and found.log_probs.shape == (2, 0)
    assert np.array_equal(policy.decode(torch.from_numpy(found.latents[:, 0]), 32).numpy(), rollout.images)


@pytest.mark.parametrize("cfg", [1.0, 4.0])
def test_an_evaluation_gives_the_images_of_the_pipeline(cfg: float, shared_models: SharedModels) -> None:
    """No noise after the initial one even if the request names noisy steps, no trajectory."""
    how = sampling(cfg=cfg)
    asked = request(3, how=how, kind=EVALUATION)
    rollout = DiffusersEngine(shared_models.tiny).generate([asked])[0]
    assert rollout.trajectory is None
    pipeline = QwenImagePipeline.from_pretrained(resolve_model(ModelConfig()).path)
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline(
        RED.text,
        negative_prompt=how.negative_prompt,
        true_cfg_scale=cfg,
        height=32,
        width=32,
        num_inference_steps=6,
        num_images_per_prompt=3,
        latents=torch.stack([torch.randn(4, 64, generator=generator(seed)) for seed in asked.initial_seeds]),
    ).images
    assert np.abs(rollout.images.astype(int) - np.stack([np.asarray(image) for image in made])).max() <= 1


def test_the_prompts_own_negative_and_system_prompt_are_used(engine: DiffusersEngine) -> None:
    how = sampling(cfg=4.0)
    plain = engine.generate([request(1, how=how)])[0]
    assert same(plain, engine.generate([request(1, how=how, prompt=replace(RED, negative=how.negative_prompt))])[0])
    assert not same(plain, engine.generate([request(1, how=how, prompt=replace(RED, negative="blue"))])[0])
    assert not same(plain, engine.generate([request(1, how=how, prompt=replace(RED, system="Be bold."))])[0])


def test_latents_that_are_not_finite_name_the_ticket_and_version() -> None:
    policy = adapted_policy()
    next(iter(lora_parameters(policy.transformer).values())).data.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"ticket 0 .*policy version 2.*not finite"):
        DiffusersEngine(policy).generate([request(1)])


@pytest.mark.parametrize(("kind", "cfg"), [("sde", 4.0), ("dance_sde", 1.0), ("cps", 4.0)])
def test_the_trainer_replays_a_trajectory_exactly(policy: QwenImagePolicy, kind: str, cfg: float) -> None:
    """With gradients on, in the sampler's shapes: ratio exactly 1. In other shapes: to float tolerance."""
    how = sampling(cfg=cfg, sde_type=kind, noise_level=0.7)
    found = trajectory_of(DiffusersEngine(policy).generate([request(4, how=how)])[0])
    negative = tensors(policy.encode([how.negative_prompt])[0])
    exact = replay(policy, found, how, negative)
    assert exact.shape == (4, 5) and exact.requires_grad
    assert torch.equal(exact.detach(), torch.zeros(4, 5, dtype=torch.float64))
    for rows in (1, 3):
        assert replay(policy, found, how, negative, rows=rows).abs().max() < 1e-6


@pytest.mark.parametrize("cfg", [1.0, 4.0])
def test_a_bfloat16_trajectory_replays_exactly_and_is_stored_in_float32(cfg: float) -> None:
    """Only the network computes in bfloat16: rounding the stored latents as well would move the ratio."""
    policy = adapted_policy(dtype="bfloat16")
    how = sampling(cfg=cfg)
    found = trajectory_of(DiffusersEngine(policy).generate([request(4, how=how)])[0])
    negative = tensors(policy.encode([how.negative_prompt])[0])
    assert found.latents.dtype == found.log_probs.dtype == found.sigmas.dtype == np.float32
    assert wrong_values(policy, found, how, negative) == 0
    rounded = torch.from_numpy(found.latents).bfloat16().float().numpy()
    assert wrong_values(policy, replace(found, latents=rounded), how, negative) > 1e-4


def wrong_values(policy: QwenImagePolicy, found: Trajectory, how: Sampling, negative: dict[str, Tensor]) -> float:
    with torch.no_grad():
        return float(replay(policy, found, how, negative).abs().max())


TEXTS = ("red red red red", "a very long prompt about a blue square, a red circle and more", "a hill")


def tickets(cfg: float = 1.0) -> list[RolloutRequest]:
    """Of other prompts, texts of other lengths and other noise."""
    return [
        replace(
            request(2, how=sampling(cfg=cfg), prompt=Prompt(ordinal, text)),
            ordinal=ordinal,
            initial_seeds=(derive(ordinal, "a"), derive(ordinal, "b")),
            noise_seeds=(derive(ordinal, "c"), derive(ordinal, "d")),
        )
        for ordinal, text in enumerate(TEXTS)
    ]


@pytest.mark.parametrize(("cfg", "chunk"), [(1.0, None), (4.0, None), (4.0, 1)])
def test_tickets_of_a_batch_are_what_they_are_alone(policy: Any, cfg: float, chunk: int | None) -> None:
    engine = DiffusersEngine(policy, batch_size=chunk)
    made = engine.generate(tickets(cfg))
    for one, ticket in zip(made, tickets(cfg), strict=True):
        expected = trajectory_of(engine.generate([ticket])[0])
        assert np.abs(trajectory_of(one).latents - expected.latents).max() < 1e-5
        assert np.abs(trajectory_of(one).log_probs - expected.log_probs).max() < 1e-5
        assert np.array_equal(trajectory_of(one).conditioning["prompt_embeds"], expected.conditioning["prompt_embeds"])
    for one, again in zip(made, engine.generate(tickets(cfg)), strict=True):
        assert np.array_equal(one.images, again.images)
        assert np.array_equal(trajectory_of(one).latents, trajectory_of(again).latents)


def test_a_ticket_that_fails_is_named_and_leaves_the_engine_whole(policy: Any) -> None:
    engine, asked = DiffusersEngine(policy), tickets()
    wrong = replace(asked[1], train_steps=(5,), noise_steps=(1,))
    with pytest.raises(ValueError, match=r"request of ticket 1: train_steps \(5,\)"):
        engine.generate([asked[0], wrong, asked[2]])
    assert len(engine.generate(asked)) == 3
