"""Tests of Wan, image to video: videos against diffusers' pipeline for its three kinds of models, and replays."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import diffusers
import pytest
import torch

from async_flowrl.config.models import architectures
from async_flowrl.config.schema import ModelConfig, TinyConfig
from async_flowrl.image_file import opened
from async_flowrl.policies import wan
from async_flowrl.policies.pipeline import PipelinePolicy, with_euler_steps
from async_flowrl.policies.registry import load_family, load_pipeline, load_policy, resolve_model, shapes_of
from async_flowrl.policies.tiny import spread_norms
from async_flowrl.rollout.text_encoder import encode_one
from async_flowrl.tickets.request import asked_of
from async_flowrl.types import ConditionImage, Prompt, Sampling
from tests.support.families import NEGATIVE, TEXT, denoised, how
from tests.support.tiny import tensors
from tests.unit.policies.test_wan import STEPS, noise, same_videos, ti2v_5b
from tests.unit.rollout.trajectories import replayed, trajectory_of

HERE = "tests.unit.policies.test_wan_image"
KINDS = {"wan21": "wan_image", "wan22": f"{HERE}:experts", "5b": f"{HERE}:first_frame"}
SIZES = {"wan21": ((5, 32, 48), (9, 48, 32)), "wan22": ((5, 32, 48), (9, 48, 32)), "5b": ((5, 64, 96), (9, 96, 64))}


def experts(config: TinyConfig) -> Any:
    """A tiny Wan 2.2 I2V-A14B: two experts that see the image in their channels alone."""
    made = wan.tiny_experts(config)
    networks = {
        name: diffusers.WanTransformer3DModel.from_config(getattr(made, name).config, in_channels=36).eval()
        for name in ("transformer", "transformer_2")
    }
    image = diffusers.WanImageToVideoPipeline(**{**made.components, **networks}, boundary_ratio=0.9)
    spread_norms(image)
    return image


def first_frame(config: TinyConfig) -> Any:
    parts = ti2v_5b(config).components
    return diffusers.WanImageToVideoPipeline(
        **{name: part for name, part in parts.items() if part is not None}, expand_timesteps=True
    )


@pytest.fixture(scope="module")
def prompt(images: list[ConditionImage]) -> Prompt:
    return Prompt(0, TEXT, negative=NEGATIVE, images=(images[0],))


def config_of(kind: str) -> ModelConfig:
    config = TinyConfig(family=KINDS[kind], heads=4)
    return ModelConfig(tiny=config, max_sequence_length=None if kind == "wan21" else 24)


@pytest.fixture(scope="module", params=KINDS)
def loaded(request: pytest.FixtureRequest) -> tuple[str, PipelinePolicy, Any]:
    model = resolve_model(config_of(request.param))
    assert model.family == "wan_image"
    pipeline = load_pipeline(model, dtype="float32", device="cpu")
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = with_euler_steps(pipeline.scheduler)
    policy = load_policy(model, dtype="float32", device="cpu", parts="all")
    return request.param, cast("PipelinePolicy", policy), pipeline


def encoded(policy: PipelinePolicy, prompt: Prompt, sampling: Sampling) -> list[Any]:
    found = [tensors(encode_one(policy, key)) for key in asked_of(prompt, sampling)]
    return [*found, None][:2]


@pytest.mark.extended
@pytest.mark.parametrize(("place", "cfg"), [(0, 4.0), (1, 1.0)])
def test_videos_are_the_stock_pipelines(place: int, cfg: float, loaded: Any, prompt: Prompt) -> None:
    kind, policy, pipeline = loaded
    second = 2.0 if kind == "wan22" and cfg > 1 else None
    sampling = replace(how("wan", cfg=cfg), resolution=SIZES[kind][place], true_cfg_scale_2=second)
    given = {"image": opened(prompt.images[0]), "max_sequence_length": 512 if kind == "wan21" else 24}
    positive, negative = encoded(policy, prompt, sampling)
    made = same_videos(policy, pipeline, sampling, positive, negative, **given)
    black = positive | {"condition": torch.zeros_like(positive["condition"])}
    end = denoised(policy, noise(policy, sampling), sampling, black, negative, steps=STEPS)
    other = policy.decode(end, sampling.resolution)
    assert (made.float() - other.float()).abs().mean() > 1, "the image matters"


@pytest.mark.extended
def test_the_trainer_replays_a_video(loaded: Any, prompt: Prompt) -> None:
    kind, policy, _ = loaded
    size = SIZES[kind][0]
    sampling = replace(how("wan", cfg=4.0, sde_type="cps", noise_level=0.7), resolution=size, num_inference_steps=6)
    made = trajectory_of(replayed(policy, sampling, prompt=prompt))
    assert made.negative is not None
    planned = shapes_of(resolve_model(config_of(kind)), size, images=1).conditioning
    found = {name: array.shape for name, array in made.conditioning.items()}
    assert found | {"image_embeds": None} == {**planned, "image_embeds": None}


def test_the_first_frame_of_the_5b_model_is_the_image(loaded: Any, prompt: Prompt) -> None:
    """Whatever the noise: its latents end as the image's, and adapters do not change their velocity."""
    kind, policy, _ = loaded
    if kind != "5b":
        pytest.skip("in the other models the image is an input alone")
    size, n = SIZES[kind][0], 2
    sampling = replace(how("wan", cfg=4.0, sde_type="sde", noise_level=0.7), resolution=size)
    (positive, negative), x = encoded(policy, prompt, sampling), torch.randn(n, *policy.latent_shape(size))
    sigma = torch.tensor([0.8, 0.3])
    with torch.no_grad():
        velocity = policy.velocity(x, sigma, positive, negative, sampling)
    ends = x - sigma.view(-1, 1, 1, 1, 1) * velocity
    assert (ends[:, :, 0] - positive["condition"][:, 0]).abs().max() < 1e-5
    assert (ends[:, :, 1] - positive["condition"][:, 0]).abs().mean() > 0.1


def test_what_it_needs_is_said() -> None:
    family: Any = load_family("wan_image")
    for images, message in ((0, "needs at least 1 image"), (2, "takes at most 1 image, and the prompt has 2")):
        with pytest.raises(ValueError, match=message):
            family.policy.check_images(images)
    sizes: list[Any] = [32, (1, 32, 32), (6, 32, 32)]
    for size, message in zip(sizes, ("frames must be 5", "frames must be 5", "nearest: 5"), strict=True):
        with pytest.raises(ValueError, match=message):
            shapes_of(resolve_model(config_of("wan21")), size, images=1)
    with pytest.raises(ValueError, match=r"max_sequence_length must be 512 .*, got 24"):
        shapes_of(resolve_model(replace(config_of("wan21"), max_sequence_length=24)), (5, 32, 32), images=1)


@pytest.mark.parametrize(
    ("name", "condition"),
    [
        ("Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", (20, 21, 60, 104)),
        ("Wan-AI/Wan2.2-I2V-A14B-Diffusers", (20, 21, 60, 104)),
        ("Wan-AI/Wan2.2-TI2V-5B-Diffusers", (48, 1, 30, 52)),
    ],
)
def test_published_models_have_their_inputs(name: str, condition: tuple[int, ...]) -> None:
    architecture, family = architectures()[name], cast("Any", load_family("wan_image"))
    network = family.network({**architecture.transformer, "num_layers": 1}, torch.bfloat16, architecture.boundary_ratio)
    latents, inputs = family.policy_of(network, None, architecture.vae, dtype=torch.bfloat16).shapes((81, 480, 832))
    assert inputs["condition"] == condition and latents[0] == (48 if "5B" in name else 16)
    assert ("image_embeds" in inputs) == ("2.1" in name)


def test_a_folder_of_text_to_video_is_looked_at_as_the_family_says(tmp_path: Path) -> None:
    """TI2V-5B is published as a WanPipeline, which takes no image."""
    ti2v_5b(TinyConfig(heads=4)).save_pretrained(tmp_path)
    for family, stock in (("wan", diffusers.WanPipeline), ("wan_image", diffusers.WanImageToVideoPipeline)):
        model = resolve_model(ModelConfig(path=str(tmp_path), family=family))
        assert isinstance(load_pipeline(model, dtype="float32", device="cpu"), stock)
