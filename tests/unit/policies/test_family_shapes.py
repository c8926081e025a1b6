"""Tests of every model family's schedule and shapes, which are known from its configurations, and of its tiny model."""

import inspect
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline

from async_flowrl.config.schema import ModelConfig, TinyConfig
from async_flowrl.policies.base import Policy
from async_flowrl.policies.registry import load_family, load_policy, resolve_model, shapes_of
from async_flowrl.policies.tiny import build_tiny
from tests.support.families import TEXT, N, conditioning, how, latents, model_config
from tests.support.shared_models import SharedModels

LARGEST = {"sd3": 256}
"""Side in pixels of the largest image of a tiny model with fewer positions than 512 px need."""


def test_the_schedule_falls_from_one_to_zero_and_sizes_that_do_not_fit_are_refused(policy: Policy, family: str) -> None:
    side = LARGEST.get(family, 512)
    sigmas = policy.sigmas(10, side)
    assert sigmas.dtype == torch.float32 and len(sigmas) == 11
    assert sigmas[0] == 1 and sigmas[-1] == 0 and bool((sigmas.diff() < 0).all())
    assert math.prod(policy.latent_shape(side)) == side**2 // 4
    with pytest.raises(ValueError, match=r"multiple of (16|32), got 40, nearest: 32"):
        policy.latent_shape(40)
    positive, _ = conditioning(policy)
    with pytest.raises(ValueError, match="not those of 64 px images"):
        policy.velocity(latents(policy), torch.ones(N), positive, None, replace(how(family), resolution=64))
    with pytest.raises(ValueError, match="needs the negative prompt"):
        policy.velocity(latents(policy), torch.ones(N), positive, None, how(family, cfg=4.0))


def test_published_schedules(shared_models: SharedModels) -> None:
    """SD3.5 with ten steps, at any size, and FLUX.1-dev with six, at 512 px."""
    sd3 = [1, 0.9601, 0.9133, 0.8577, 0.7904, 0.7073, 0.6022, 0.4649, 0.2780, 0.0089, 0]
    flux = [1, 0.9037, 0.7897, 0.6525, 0.4842, 0.2730, 0]
    assert torch.allclose(shared_models.policy("sd3").sigmas(10, 256), torch.tensor(sd3), atol=1e-4)
    assert torch.allclose(shared_models.policy("flux").sigmas(6, 512), torch.tensor(flux), atol=1e-4)


@pytest.mark.parametrize("flag", ["use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "invert_sigmas"])
def test_the_flags_of_a_scheduler_are_honoured_or_refused(tmp_path: Path, flag: str) -> None:
    """Against the schedule with which the stock pipeline has just made an image."""
    folder = shutil.copytree(build_tiny(TinyConfig(layers=1)), tmp_path / "model")
    settings = folder / "scheduler" / "scheduler_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {flag: True}))
    policy = load_policy(resolve_model(ModelConfig(path=str(folder))), dtype="float32", device="cpu", parts="structure")
    if flag == "invert_sigmas":
        with pytest.raises(ValueError, match="no schedule that falls from 1 to 0"):
            policy.sigmas(6, 64)
        return
    stock = DiffusionPipeline.from_pretrained(folder)
    stock(prompt="red", num_inference_steps=6, height=64, width=64, output_type="latent")
    assert torch.equal(policy.sigmas(6, 64), stock.scheduler.sigmas)


@pytest.mark.parametrize("resolution", [32, 512])
def test_shapes_are_known_from_the_configurations(policy: Policy, family: str, resolution: int) -> None:
    model = resolve_model(model_config(family))
    resolution = min(resolution, LARGEST.get(family, resolution))
    found = shapes_of(model, resolution)
    assert found.latents == policy.latent_shape(resolution)
    (encoded,) = policy.encode([TEXT])
    assert found.conditioning.keys() == encoded.keys()
    # A text's own length is not known before; where it is padded, the tiny model's CLIP reads less than a real one.
    assert all(math.prod(shape) >= encoded[name].size for name, shape in found.conditioning.items())
    if family == "flux":
        assert dict(found.conditioning) == {name: value.shape for name, value in encoded.items()}
    with pytest.raises(ValueError, match=r"resolution must be a multiple of (16|32), got 40, nearest: 32"):
        shapes_of(model, 40)


def test_a_family_is_one_short_file(family: str) -> None:
    module = inspect.getsourcefile(load_family(resolve_model(model_config(family)).family).__class__)
    assert module is not None and Path(module).stem == family
    assert len(Path(module).read_text().splitlines()) < 260


def test_the_tiny_pipeline_is_the_same_bytes_every_time(family: str, tmp_path: Path) -> None:
    first, second = build_tiny(TinyConfig(family=family)), build_tiny(TinyConfig(family=family), tmp_path)
    files = sorted(file.relative_to(first) for file in first.rglob("*") if file.is_file())
    assert files == sorted(file.relative_to(second) for file in second.rglob("*") if file.is_file())
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in files)
    with pytest.raises(ValueError, match=r"model\.tiny\.family must be one of .*did you mean 'flux'"):
        build_tiny(TinyConfig(family="fluxx"), tmp_path)
