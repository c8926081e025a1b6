"""Tests of the family Wan: videos against diffusers' pipeline, what stays float32, and frames that are refused."""

from dataclasses import replace
from typing import Any, cast

import diffusers
import pytest
import torch
from torch import Tensor

from async_flowrl.config.schema import ModelConfig, TinyConfig
from async_flowrl.policies.pipeline import PipelinePolicy, with_euler_steps
from async_flowrl.policies.registry import load_family, load_pipeline, load_policy, resolve_model
from async_flowrl.policies.tiny import spread_norms
from async_flowrl.policies.wan import tiny_pipeline
from async_flowrl.types import Sampling
from tests.support.families import NEGATIVE, TEXT, conditioning, denoised, how
from tests.support.shared_models import SharedModels
from tests.unit.rollout.trajectories import replayed

STEPS = 4


WIDE, TALL = (5, 32, 48), (9, 48, 32)
CASES = [
    ("wan", 1.0, None, WIDE),
    ("wan", 4.0, None, TALL),
    ("wan22", 1.0, None, TALL),
    ("wan22", 4.0, None, WIDE),
    ("wan22", 4.0, 2.0, TALL),
]


@pytest.mark.extended
@pytest.mark.parametrize(("name", "cfg", "second", "size"), CASES)
def test_videos_are_the_stock_pipelines(
    size: tuple[int, int, int], name: str, cfg: float, second: float | None, shared_models: SharedModels
) -> None:
    sampling = replace(how(name, cfg=cfg), resolution=size, true_cfg_scale_2=second)
    assert load_family("wan").guidance_arguments(sampling).get("guidance_scale_2") == second
    policy = shared_models.policy(name)
    if policy.experts:
        of_first = sum(float(sigma) >= 0.875 for sigma in policy.sigmas(STEPS, size)[:-1])
        assert 0 < of_first < STEPS, "both experts are used"
    same_videos(policy, shared_models.pipeline(name), sampling, *conditioning(policy))


def noise(policy: PipelinePolicy, sampling: Sampling) -> Tensor:
    shape = policy.latent_shape(sampling.resolution)
    return torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))


def same_videos(policy: PipelinePolicy, pipeline: Any, sampling: Sampling, *branches: Any, **options: Any) -> Any:
    """Asserts that policy and stock pipeline make the same two videos, at most one level of 255 apart; returns them."""
    frames, height, width = size = cast("tuple[int, int, int]", sampling.resolution)
    start = noise(policy, sampling)
    guidance = load_family("wan").guidance_arguments(sampling) | {"negative_prompt": [NEGATIVE] * 2}
    asked = {"height": height, "width": width, "num_frames": frames, "num_inference_steps": STEPS, "latents": start}
    options = {"prompt": [TEXT] * 2, "output_type": "pt", "max_sequence_length": 24, **guidance, **asked, **options}
    theirs = pipeline(**options).frames
    ours = policy.decode(denoised(policy, start, sampling, *branches, steps=STEPS), size)
    assert ours.dtype == torch.uint8 and ours.shape == (2, *size, 3)
    assert (ours.int() - (255 * theirs.movedim(2, -1)).round().int()).abs().max() <= 1
    assert (ours[:, 0].float() - ours[:, -1].float()).abs().mean() > 1, "its frames differ"
    return ours


@pytest.mark.extended
@pytest.mark.parametrize("name", ["wan", "wan22"])
@pytest.mark.parametrize(("cfg", "kind"), [(1.0, "sde"), (4.0, "cps")])
def test_the_trainer_replays_a_video(name: str, cfg: float, kind: str, shared_models: SharedModels) -> None:
    policy, size = shared_models.policy(name), (5, 32, 48)
    sampling = replace(how(name, cfg=cfg, sde_type=kind, noise_level=0.7), resolution=size, num_inference_steps=6)
    _, negative = conditioning(policy)
    assert replayed(policy, sampling, negative=negative).images.shape == (3, *size, 3)


def test_frames_that_a_model_cannot_make_are_refused(shared_models: SharedModels) -> None:
    for frames, nearest in ((8, 9), (10, 9), (4, 5), (2, 1)):
        with pytest.raises(ValueError, match=rf"^frames .* {frames}, nearest: {nearest}$"):
            shared_models.policy("wan").latent_shape((frames, 32, 32))
    with pytest.raises(ValueError, match=r"^frames .*5$"):
        shared_models.policy("qwen_image").latent_shape((5, 32, 32))


def ti2v_5b(config: TinyConfig) -> Any:
    """A tiny Wan 2.2 TI2V-5B: a time per token in the stock pipeline, and a VAE with 16 pixels per side of a latent."""
    pipeline = tiny_pipeline(config)
    z, settings = 48, {key: value for key, value in pipeline.transformer.config.items() if not key.startswith("_")}
    network = diffusers.WanTransformer3DModel(**{**settings, "in_channels": z, "out_channels": z})
    vae = diffusers.AutoencoderKLWan(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=z,
        num_res_blocks=1,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        latents_mean=torch.linspace(-1, 1, z).tolist(),
        latents_std=torch.linspace(0.5, 2, z).tolist(),
    )
    parts = {**pipeline.components, "transformer": network.eval(), "vae": vae.eval()}
    made = diffusers.WanPipeline(**parts, expand_timesteps=True)
    spread_norms(made)
    return made


@pytest.mark.extended
@pytest.mark.parametrize("cfg", [1.0, 4.0])
def test_the_5b_model_is_text_to_video_by_the_same_road(cfg: float) -> None:
    tiny_config = TinyConfig(family="tests.unit.policies.test_wan:ti2v_5b", heads=4)
    model = resolve_model(ModelConfig(tiny=tiny_config, max_sequence_length=24))
    policy = load_policy(model, dtype="float32", device="cpu", parts="all")
    pipeline = load_pipeline(model, dtype="float32", device="cpu")
    pipeline.scheduler = with_euler_steps(pipeline.scheduler)
    assert policy.latent_shape((5, 64, 96)) == (48, 2, 4, 6)
    with pytest.raises(ValueError, match=r"multiples of 32, .* 64 × 80"):
        policy.latent_shape((5, 64, 80))
    same_videos(policy, pipeline, replace(how("wan", cfg=cfg), resolution=(5, 64, 96)), *conditioning(policy))
