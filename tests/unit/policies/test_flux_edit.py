"""Tests of FLUX.1-Kontext against diffusers' own pipeline, on the tiny model, and of what a trainer replays."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.flux import pipeline_flux_kontext
from PIL import Image
from torch import Tensor

from async_flowrl.algorithms import sde
from async_flowrl.cli.generate import arguments_of, to_edit
from async_flowrl.config.schema import LoraConfig
from async_flowrl.data.condition_images import examined
from async_flowrl.policies.lora import add_lora, lora_modules, lora_parameters
from async_flowrl.policies.registry import LengthCheck, load_policy, resolve_model, shapes_of
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.types import Prompt
from tests.support.families import how, model_config, pipeline_of, policy_of
from tests.support.tiny import randomise, request, save_lora, tensors
from tests.unit.rollout.trajectories import replay

TEXT, NEGATIVE, STEPS = "make the house blue", "grey", 3
FAMILY = "flux_kontext"
SIDES = [(200, 300), (128, 96)]
SIZES = [(64, 32), (32, 96)]
CASES = list(itertools.product(SIZES, (1.0, 4.0), (0, 1)))
CHEAP = (SIZES[1], 4.0, 0)
PUBLISHED = pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS


@pytest.fixture(scope="module", autouse=True)
def small_images() -> Iterator[None]:
    """About a 100th of the tokens of an image, wider and higher than long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", [(64, 128), (96, 96), (170, 110)])
        yield


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Images to edit, of different aspect ratios."""
    folder, found = tmp_path_factory.mktemp("images"), []
    for seed, size in enumerate(SIDES):
        coarse = np.random.default_rng(seed).integers(0, 255, (5, 7, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize(size[::-1]).save(folder / f"{seed}.png")
        found.append(examined(folder / f"{seed}.png"))
    return found


def prompt_of(*images: Any) -> Prompt:
    return Prompt(0, TEXT, negative=NEGATIVE, images=images)


def encoded(policy: Any, prompt: Prompt) -> list[dict[str, Tensor]]:
    """The arrays of the prompt and of its negative prompt."""
    return [
        tensors(policy.encode([words], negative=negative)[0])
        for words, negative in ((prompt.wording, False), (prompt.negative_wording(""), True))
    ]


@pytest.fixture(scope="module")
def policy() -> Any:
    return policy_of(FAMILY)


@pytest.fixture(scope="module")
def stock() -> Any:
    return pipeline_of(FAMILY)


def arguments(stock: Any, sampling: Any, prompt: Prompt) -> dict[str, Any]:
    given = arguments_of(stock, model_config(FAMILY), sampling)
    return {**given, "prompt": TEXT, **to_edit(prompt.images)}


def sampled(policy: Any, start: Tensor, branches: Any, sampling: Any) -> Tensor:
    x, (positive, negative) = start, branches
    with torch.no_grad():
        for sigma, after in itertools.pairwise(policy.sigmas(STEPS, sampling.resolution)):
            levels = sigma.expand(len(x)), after.expand(len(x))
            v = policy.velocity(x, levels[0], positive, negative if sampling.true_cfg_scale > 1 else None, sampling)
            x = sde.ode_step(x, v, *levels)
    return x


@pytest.mark.parametrize(
    ("size", "cfg", "which"),
    [case if case == CHEAP else pytest.param(*case, marks=pytest.mark.slow) for case in CASES],
)
def test_edits_are_the_stock_pipelines(
    size: tuple[int, int], cfg: float, which: int, policy: Any, stock: Any, images: list[Any]
) -> None:
    """Latents and pixels; also with another image, which changes them."""
    start = torch.randn(2, *policy.latent_shape(size), generator=torch.Generator().manual_seed(0))
    sampling = replace(how(FAMILY, cfg=cfg, steps=STEPS), resolution=size, negative_prompt=NEGATIVE)
    prompt = prompt_of(images[which])
    asked = {**arguments(stock, sampling, prompt), "num_images_per_prompt": 2, "return_dict": False}
    (theirs,) = stock(latents=start, output_type="latent", **asked)
    branches = encoded(policy, prompt)
    ours = sampled(policy, start, branches, sampling)
    assert (ours - theirs).abs().max() < 2e-5
    (pictures,) = stock(latents=start, output_type="pil", **asked)
    decoded = policy.decode(ours, size).numpy()
    assert np.abs(decoded.astype(int) - np.stack(list(map(np.asarray, pictures)))).max() <= 1 and decoded.std() > 10
    black = branches[0] | {"image_0": torch.zeros_like(branches[0]["image_0"])}
    assert (sampled(policy, start, (black, branches[1]), sampling) - ours).abs().max() > 1e-3


@pytest.mark.parametrize(("cfg", "kind"), [(1.0, "sde"), (4.0, "cps")])
def test_the_trainer_replays_an_edit(cfg: float, kind: str, policy: Any, images: list[Any]) -> None:
    sampling = replace(how(FAMILY, cfg=cfg, sde_type=kind, noise_level=0.7), resolution=(32, 64))
    wanted = request(3, how=sampling, prompt=prompt_of(images[1]), noise_steps=(0, 1))
    found = DiffusersEngine(policy).generate([wanted])[0].trajectory
    assert found is not None and (found.negative is None) == (cfg == 1)
    assert "image_0" in found.conditioning
    negative = None if found.negative is None else tensors(found.negative)
    exact = replay(policy, found, sampling, negative, rows=3)
    assert torch.equal(exact, torch.zeros_like(exact))
    assert replay(policy, found, sampling, negative, rows=1).abs().max() < 1e-6


def test_prompts_with_images_of_different_sizes_share_a_batch(policy: Any, images: list[Any]) -> None:
    sampling, pairs = how(FAMILY, cfg=3.0), [encoded(policy, prompt_of(image)) for image in images]
    x = torch.randn(4, *policy.latent_shape(32), generator=torch.Generator().manual_seed(1))
    sigma = torch.tensor([0.9, 0.9, 0.2, 0.2])
    with torch.no_grad():
        together = policy.velocity_of(x, sigma, [p for p, _ in pairs], [n for _, n in pairs], sampling)
        alone = [
            policy.velocity(rows, level, *pair, sampling)
            for rows, level, pair in zip(x.chunk(2), sigma.chunk(2), pairs, strict=True)
        ]
    assert (together - torch.cat(alone)).abs().max() < 1e-5


def test_the_exported_adapter_edits_alike_in_the_stock_pipeline(stock: Any, images: list[Any], tmp_path: Any) -> None:
    """Every layer of it has a gradient."""
    policy: Any = policy_of(FAMILY)
    add_lora(policy.transformer, LoraConfig(rank=2, alpha=5.0), policy, seed=0)
    randomise(lora_parameters(policy.transformer))
    start = torch.randn(1, *policy.latent_shape(32), generator=torch.Generator().manual_seed(0))
    sampling, prompt = how(FAMILY, steps=STEPS), prompt_of(images[1])
    branches = encoded(policy, prompt)
    policy.velocity(start, torch.tensor([0.5]), branches[0], None, sampling).square().sum().backward()
    layers = lora_parameters(policy.transformer)
    assert lora_modules(policy.transformer) and all(bool(p.grad.any()) for p in layers.values())
    save_lora(tmp_path, policy.transformer, alpha=5.0)
    asked = {**arguments(stock, sampling, prompt), "output_type": "latent", "return_dict": False}
    (base,) = stock(latents=start, **asked)
    stock.load_lora_weights(tmp_path)
    try:
        (theirs,) = stock(latents=start, **asked)
    finally:
        stock.unload_lora_weights()
    assert (sampled(policy, start, branches, sampling) - theirs).abs().max() < 2e-5 < (base - theirs).abs().max()


def test_processes_of_parts_and_random_weights_have_the_same_arrays(policy: Any, images: list[Any]) -> None:
    prompt = prompt_of(images[1])
    (whole,) = policy.encode([prompt.wording])
    (alone,) = policy_of(FAMILY, parts="text").encode([prompt.wording])
    assert whole.keys() == alone.keys() and all(np.array_equal(whole[name], alone[name]) for name in whole)
    model = resolve_model(replace(model_config(FAMILY), weights="random", dtype="float32"))
    (drawn,) = load_policy(model, dtype="float32", device="cpu", parts="all").encode([prompt.wording])
    assert {name: array.shape[-1] for name, array in drawn.items()} == {n: a.shape[-1] for n, a in whole.items()}
    planned = shapes_of(model, 32, 1).conditioning
    assert {name: array.shape for name, array in drawn.items()} == planned


@pytest.mark.slow
def test_image_sizes_are_those_of_the_stock_table(policy: Any, stock: Any, images: list[Any], monkeypatch: Any) -> None:
    """Which has a size of about 1024 × 1024 pixels for every shape; a token of the tiny model has 32 × 32."""
    monkeypatch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", PUBLISHED)
    branches = [encoded(policy, prompt_of(image)) for image in images]
    assert [tuple(pair[0]["image_0"].shape) for pair in branches] == [(26, 39, 64), (37, 27, 64)]
    start, sampling = torch.zeros(1, *policy.latent_shape(32)), how(FAMILY, steps=STEPS)
    given = arguments(stock, sampling, prompt_of(images[0]))
    (theirs,) = stock(latents=start, output_type="latent", return_dict=False, **given)
    assert (sampled(policy, start, branches[0], sampling) - theirs).abs().max() < 2e-5


def test_what_it_cannot_do_is_refused(policy: Any, images: list[Any]) -> None:
    for wrong, said in (([], "needs at least 1 image"), (images, "takes at most 1 image")):
        with pytest.raises(ValueError, match=said):
            policy.encode([prompt_of(*wrong).wording])
    check = LengthCheck(resolve_model(model_config(FAMILY)))
    check(prompt_of(images[0]))
    with pytest.raises(ValueError, match="16 px at least"):
        check(prompt_of(replace(images[0], size=(15, 300))))
