"""Tests of the duties of every model family, against diffusers' pipelines; a new family is one more parameter."""

import inspect
import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from async_flowrl.algorithms import sde
from async_flowrl.config.sections.model import TinyConfig
from async_flowrl.config.sections.tune import LoraConfig
from async_flowrl.export import save_lora
from async_flowrl.observability.flops import FlopCounter
from async_flowrl.policies import pipeline as pipeline_module
from async_flowrl.policies.base import Policy
from async_flowrl.policies.lora import add_lora, lora_modules, lora_parameters, reference_mode
from async_flowrl.policies.registry import (
    check_prompts_of,
    family_of,
    load_family,
    resolve_model,
    shapes_of,
)
from async_flowrl.policies.tiny.build import build_tiny
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.training.fsdp import checkpoint_blocks
from async_flowrl.types import EVALUATION, Prompt, Sampling
from tests.support.families import (
    NAMES,
    NEGATIVE,
    TEXT,
    adapted,
    conditioning,
    how,
    model_config,
    policy_of,
)
from tests.support.shared_models import SharedModels
from tests.support.tiny import randomise, request, tensors

LARGEST = {"sd3": 256}
"""Side in pixels of the largest image of a tiny model with fewer positions than 512 px need."""
N = 3


@pytest.fixture(scope="module", params=NAMES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def policy(family: str) -> Policy:
    return adapted(family)


@pytest.fixture(scope="module")
def plain(family: str, shared_models: SharedModels) -> Policy:
    """The policy without an adapter."""
    return shared_models.policy(family)


@pytest.fixture(scope="module")
def pipeline(family: str, shared_models: SharedModels) -> Any:
    """diffusers' pipeline, without an adapter."""
    return shared_models.pipeline(family)


def latents(policy: Policy, n: int = N, seed: int = 0) -> Tensor:
    return torch.randn(n, *policy.latent_shape(32), generator=torch.Generator().manual_seed(seed))


def denoised(policy: Policy, sampling: Sampling) -> Tensor:
    positive, negative = conditioning(policy)
    x = latents(policy)
    with torch.no_grad():
        for sigma, after in itertools.pairwise(policy.sigmas(6, 32)):
            velocity = policy.velocity(x, sigma.expand(N), positive, negative, sampling)
            x = sde.ode_step(x, velocity, sigma.expand(N), after.expand(N))
    return x


def made(pipeline: Any, policy: Policy, sampling: Sampling, output: str = "latent") -> Any:
    """What the stock pipeline makes from the same noise."""
    length = model_config(policy.family).max_sequence_length
    return pipeline(
        TEXT,
        height=32,
        width=32,
        num_inference_steps=6,
        num_images_per_prompt=N,
        latents=latents(policy),
        output_type=output,
        **family_of(pipeline).guidance_arguments(sampling),
        **({} if length is None else {"max_sequence_length": length}),
    ).images


@pytest.mark.parametrize("cfg", [4.0, pytest.param(1.0, marks=pytest.mark.slow)])
def test_the_exported_adapter_in_the_stock_pipeline_denoises_alike(
    policy: Policy, pipeline: Any, family: str, cfg: float, tmp_path: Path
) -> None:
    """ODE parity and the export's round trip in one: without the adapter the latents are others."""
    save_lora(tmp_path, policy.transformer, alpha=10.0)
    untouched = made(pipeline, policy, how(family, cfg=cfg))
    pipeline.load_lora_weights(tmp_path)
    try:
        theirs = made(pipeline, policy, how(family, cfg=cfg))
    finally:
        pipeline.unload_lora_weights()
    ours = denoised(policy, how(family, cfg=cfg))
    assert (theirs - ours).abs().max() < 2e-5
    assert (untouched - ours).abs().max() > 0.05
    with reference_mode(policy.transformer):
        assert (denoised(policy, how(family, cfg=cfg)) - untouched).abs().max() < 2e-5


def test_images_are_the_pipelines(policy: Policy, pipeline: Any, family: str) -> None:
    images = policy.decode(made(pipeline, policy, how(family)), 32).numpy()
    theirs = np.stack([np.asarray(image) for image in made(pipeline, policy, how(family), "pil")])
    assert images.dtype == np.uint8 and images.shape == (N, 32, 32, 3)
    assert np.abs(images.astype(int) - theirs).max() <= 1
    assert images.std() > 10


@pytest.mark.parametrize(("cfg", "kind"), [(1.0, "sde"), (4.0, "cps")])
def test_the_trainer_replays_a_trajectory(policy: Policy, family: str, cfg: float, kind: str) -> None:
    """The log-ratio is exactly 0 in the sampler's shapes and grad mode, and below 1e-6 row by row."""
    sampling = how(family, cfg=cfg, sde_type=kind, noise_level=0.7)
    found = DiffusersEngine(policy).generate(request(N, how=sampling)).trajectory
    assert found is not None
    _, negative = conditioning(policy)
    exact = replay(policy, found, sampling, negative, rows=N)
    assert torch.equal(exact, torch.zeros_like(exact))
    alone = replay(policy, found, sampling, negative, rows=1)
    assert alone.abs().max() < 1e-6
    if cfg > 1:
        wrong = replay(policy, found, replace(sampling, true_cfg_scale=3.0), negative, rows=N)
        assert wrong.abs().max() > 1e-4


def replay(policy: Policy, found: Any, sampling: Sampling, negative: Any, *, rows: int) -> Tensor:
    """Mean log-prob of each recorded transition under the trainer's forward minus the recorded one, [n, W] float64."""
    sigmas, positive = torch.from_numpy(found.sigmas), tensors(found.conditioning)
    x, ratios = torch.from_numpy(found.latents), []
    for column, step in enumerate(found.train_steps):
        values = []
        for start in range(0, len(x), rows):
            now, following = x[start : start + rows, step], x[start : start + rows, step + 1]
            sigma, after = (sigmas[i].expand(len(now)) for i in (step, step + 1))
            transition = sde.transition(
                now,
                policy.velocity(now, sigma, positive, negative, sampling),
                sigma,
                after,
                sigma_after_first=sigmas[1],
                sde_type=sampling.sde_type,
                noise_level=sampling.noise_level,
            )
            values.append(sde.log_prob(following, transition, sampling.sde_type).float().detach())
        ratios.append(torch.cat(values).double() - torch.from_numpy(found.log_probs[:, column]).double())
    return torch.stack(ratios, dim=1)


def test_every_adapted_layer_has_a_gradient_and_every_excluded_one_has_none(family: str) -> None:
    policy = policy_of(family)
    exclude = policy.lora_exclude

    class Whole:
        lora_targets, lora_exclude = policy.lora_targets, None

    add_lora(policy.transformer, LoraConfig(rank=2), Whole(), seed=0)  # type: ignore[arg-type]
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


def test_guidance_that_the_network_does_not_take_is_refused(policy: Policy, family: str) -> None:
    positive, _ = conditioning(policy)
    x, sigma = latents(policy), torch.ones(N)
    if family == "flux":
        with pytest.raises(ValueError, match=r"guidance_scale must be above 0 for FLUX\.1"):
            policy.velocity(x, sigma, positive, None, replace(how(family), guidance_scale=0.0))
        weak, strong = (
            policy.velocity(x, sigma, positive, None, replace(how(family), guidance_scale=g)) for g in (1.0, 5.0)
        )
        assert (weak - strong).abs().max() > 1e-3
    else:
        with pytest.raises(ValueError, match=r"rollout\.guidance_scale must be 0 for .*, got 3\.5"):
            policy.velocity(x, sigma, positive, None, replace(how(family), guidance_scale=3.5))


def test_a_prompt_is_encoded_alike_whoever_else_is(policy: Policy, family: str) -> None:
    together = policy.encode([TEXT, "blue"])
    for text, found in zip([TEXT, "blue"], together, strict=True):
        (alone,) = policy.encode([text])
        assert found.keys() == alone.keys()
        assert all(found[name].dtype == np.float32 and np.array_equal(found[name], alone[name]) for name in found)
    assert not np.array_equal(together[0]["prompt_embeds"][:5], together[1]["prompt_embeds"][:5])


def test_prompts_that_a_family_has_no_place_for_are_refused_before_a_model_is_loaded(
    policy: Policy, family: str
) -> None:
    model = resolve_model(model_config(family))
    polite, tokenised = Prompt(3, TEXT, system="Paint."), Prompt(4, TEXT, negative_token_ids=(1, 2))
    check_prompts_of(model, [Prompt(0, TEXT, negative=NEGATIVE)])
    if family == "qwen_image":
        check_prompts_of(model, [polite])
        return
    for prompt, message in ((polite, "has no system prompt, prompt 3 "), (tokenised, "prompts as text, prompt 4 ")):
        with pytest.raises(ValueError, match=message):
            check_prompts_of(model, [Prompt(0, TEXT), prompt])
    with pytest.raises(ValueError, match="has no system prompt, got 'Paint'"):
        policy.encode([TEXT], system="Paint")
    with pytest.raises(ValueError, match="takes prompts as text, got 2 token ids"):
        policy.encode([(1, 2)])


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
    assert len(Path(module).read_text().splitlines()) < 150


def test_a_trainer_process_has_only_the_transformer_and_the_same_weights(family: str, policy: Policy) -> None:
    part = policy_of(family, parts="transformer")
    assert part.latent_shape(32) == policy.latent_shape(32)
    base = dict(part.transformer.named_parameters())
    whole = {
        name.replace(".base_layer", ""): p for name, p in policy.transformer.named_parameters() if "lora_" not in name
    }
    assert base.keys() == whole.keys()
    assert all(torch.equal(base[name], whole[name]) for name in base)
    with pytest.raises(RuntimeError, match="only the transformer and cannot encode prompts"):
        part.encode([TEXT])
    with pytest.raises(RuntimeError, match="only the transformer and cannot decode images"):
        part.decode(latents(part), 32)


def test_bfloat16_computes_there_and_returns_float32(plain: Policy, family: str) -> None:
    half = policy_of(family, dtype="bfloat16")
    positive, _ = conditioning(plain)
    with torch.no_grad():
        found, exact = (
            p.velocity(latents(plain), torch.full((N,), 0.6), positive, None, how(family)) for p in (half, plain)
        )
    assert found.dtype == torch.float32
    assert 0 < (found - exact).abs().max() < 0.3


def test_the_flops_counter_sees_what_torch_sees(policy: Policy, family: str) -> None:
    """With attention unfused, as two batched products that torch's own counter knows too."""
    positive, _ = conditioning(policy)
    x, sigma = latents(policy), torch.full((N,), 0.5)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as torchs, FlopCounter() as ours:
        policy.velocity(x, sigma, positive, None, how(family)).square().sum().backward()
    assert ours.total == torchs.get_total_flops() > 0


def test_evaluations_make_images(policy: Policy, family: str) -> None:
    images = DiffusersEngine(policy).generate(request(2, how=how(family), kind=EVALUATION)).images
    assert images.shape == (2, 32, 32, 3)


def test_the_tiny_pipeline_is_the_same_bytes_every_time(family: str, tmp_path: Path) -> None:
    first, second = build_tiny(TinyConfig(family=family)), build_tiny(TinyConfig(family=family), tmp_path)
    files = sorted(file.relative_to(first) for file in first.rglob("*") if file.is_file())
    assert files == sorted(file.relative_to(second) for file in second.rglob("*") if file.is_file())
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in files)
    with pytest.raises(ValueError, match=r"model\.tiny\.family must be one of .*did you mean 'flux'"):
        build_tiny(TinyConfig(family="fluxx"), tmp_path)


def test_guidance_in_two_passes_is_guidance_in_one(policy: Policy, family: str) -> None:
    """On CUDA, for texts of other lengths, the branches go apart and need no mask; a CPU takes them in one batch."""
    sampling = how(family, cfg=4.0)
    positive, negative = conditioning(policy)
    x, sigma = latents(policy), torch.full((N,), 0.7)
    with patch.object(policy, "_network", wraps=policy._network) as network:
        together = policy.velocity(x, sigma, positive, negative, sampling)
        assert network.call_count == 1
        with patch.object(pipeline_module, "apart", return_value=True):
            apart = policy.velocity(x, sigma, positive, negative, sampling)
        assert network.call_count == 3
    assert (apart - together).abs().max() < 1e-5 * max(1.0, float(together.abs().max()))
    assert apart.requires_grad == together.requires_grad


def test_offloaded_text_encoders_are_those_of_the_pipeline_and_change_no_bit(plain: Policy, family: str) -> None:
    """The encoders stay on the host while the rest is loaded, and hold the same weights."""
    offloaded = policy_of(family, parts="offload")
    assert len(offloaded.text_encoders) == {"sd3": 3, "flux": 2}.get(family, 1)
    asked = request(N, how=how(family, cfg=4.0))
    one = DiffusersEngine(plain).generate(asked)
    two = DiffusersEngine(offloaded, text_encoder="offload").generate(asked)
    assert np.array_equal(one.images, two.images)
    assert one.trajectory is not None and two.trajectory is not None
    assert np.array_equal(one.trajectory.latents, two.trajectory.latents)
