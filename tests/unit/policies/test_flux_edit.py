"""Tests of FLUX.1-Kontext and FLUX.2-klein against diffusers' own pipelines, on tiny models, and of their replay."""

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.flux import pipeline_flux_kontext
from diffusers.pipelines.flux2 import pipeline_flux2_klein
from PIL import Image
from torch import Tensor

from async_flowrl.cli import check_model, generate
from async_flowrl.cli.generate import arguments_of
from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import LoraConfig, ModelConfig
from async_flowrl.data.condition_images import examined
from async_flowrl.policies import checked
from async_flowrl.policies.flux2_klein import Flux2KleinPolicy
from async_flowrl.policies.lora import lora_modules, lora_parameters
from async_flowrl.policies.registry import (
    PromptCheck,
    check_images_of,
    load_family,
    load_policy,
    resolve_model,
    shapes_of,
)
from async_flowrl.run.precheck import precheck
from async_flowrl.run.prepare import prepare
from async_flowrl.types import Prompt
from tests.support.families import adapted, denoised, how, last_latents, model_config, pipeline_of, policy_of, to_edit
from tests.support.tiny import save_lora, tensors
from tests.unit.rollout.trajectories import check_batch, replayed, trajectory_of

TEXT, NEGATIVE, STEPS = "make the house blue", "grey", 3
MORE = [
    ("flux_kontext", (64, 32), 1.0, (0,)),
    ("flux_kontext", (64, 32), 4.0, (1,)),
    ("flux_kontext", (32, 96), 1.0, (1,)),
    ("flux2_klein", (48, 32), 1.0, ()),
    ("flux2_klein", (48, 32), 1.0, (0,)),
    ("flux2_klein", (32, 96), 1.0, (0, 1)),
    ("flux2_klein", (32, 96), 4.0, ()),
    ("flux2_klein", (32, 96), 4.0, (0,)),
]
"""Of `make test-slow`: with CHEAP, each pair of a family, a size, a guidance and a choice of images."""
CHEAP = [("flux_kontext", (32, 96), 4.0, (0,)), ("flux2_klein", (48, 32), 4.0, (0, 1))]
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
    return to_edit(tmp_path_factory.mktemp("images"), (90, 150), (128, 96))


def prompt_of(*images: Any) -> Prompt:
    return Prompt(0, TEXT, negative=NEGATIVE, images=images)


def encoded(policy: Any, prompt: Prompt) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The arrays of the prompt and of its negative prompt."""
    negative = policy.encode([prompt.negative_wording("")], negative=True)
    return tensors(policy.encode([prompt.wording])[0]), tensors(negative[0])


@pytest.fixture(scope="module", params=["flux_kontext", "flux2_klein"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def policy(family: str) -> Any:
    return policy_of(family)


@pytest.fixture(scope="module")
def stock(family: str) -> Any:
    return pipeline_of(family)


def arguments(stock: Any, family: str, sampling: Any, prompt: Prompt) -> dict[str, Any]:
    given = arguments_of(stock, model_config(family), sampling)
    return {**given, "prompt": TEXT, **generate.to_edit(prompt.images)}


def sampled(policy: Any, start: Tensor, branches: Any, sampling: Any) -> Tensor:
    positive, negative = branches
    return denoised(policy, start, sampling, positive, negative if sampling.true_cfg_scale > 1 else None, steps=STEPS)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("family", "size", "cfg", "which"),
    [*CHEAP, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
    indirect=["family"],
)
def test_edits_are_the_stock_pipelines(
    family: str, size: tuple[int, int], cfg: float, which: tuple[int, ...], policy: Any, stock: Any, images: list[Any]
) -> None:
    """Latents and pixels; also with another image, which changes them."""
    start = torch.randn(2, *policy.latent_shape(size), generator=torch.Generator().manual_seed(0))
    sampling = replace(how(family, cfg=cfg, steps=STEPS), resolution=size, negative_prompt=NEGATIVE)
    prompt = prompt_of(*(images[place] for place in which))
    asked = {**arguments(stock, family, sampling, prompt), "num_images_per_prompt": 2}
    given = policy.stock_latents(start, size)
    theirs = last_latents(stock, latents=given, **asked)
    branches = encoded(policy, prompt)
    ours = sampled(policy, start, branches, sampling)
    assert (ours - theirs).abs().max() < 2e-5
    (pictures,) = stock(latents=given, return_dict=False, **asked)
    decoded = policy.decode(ours, size).numpy()
    assert np.abs(decoded.astype(int) - np.stack(list(map(np.asarray, pictures)))).max() <= 1 and decoded.std() > 10
    for place in range(len(which)):
        black = branches[0] | {f"image_{place}": torch.zeros_like(branches[0][f"image_{place}"])}
        assert (sampled(policy, start, (black, branches[1]), sampling) - ours).abs().max() > 1e-3


@pytest.mark.extended
def test_the_trainer_replays_an_edit(family: str, policy: Any, images: list[Any]) -> None:
    sampling = replace(how(family, cfg=4.0, sde_type="cps", noise_level=0.7), resolution=(32, 64))
    found = trajectory_of(replayed(policy, sampling, prompt=prompt_of(images[1]), noisy=2))
    assert found.negative is not None and "image_0" in found.conditioning


@pytest.mark.extended
def test_prompts_with_images_of_different_sizes_share_a_batch(family: str, policy: Any, images: list[Any]) -> None:
    check_batch(policy, [encoded(policy, prompt_of(image)) for image in images])


@pytest.mark.extended
def test_the_exported_adapter_edits_alike_in_the_stock_pipeline(
    family: str, stock: Any, images: list[Any], tmp_path: Path
) -> None:
    """Every layer of it has a gradient."""
    policy: Any = adapted(family, lora=LoraConfig(rank=2, alpha=5.0))
    start = torch.randn(1, *policy.latent_shape(32), generator=torch.Generator().manual_seed(0))
    sampling, prompt = how(family, steps=STEPS), prompt_of(images[1])
    branches = encoded(policy, prompt)
    policy.velocity(start, torch.tensor([0.5]), branches[0], None, sampling).square().sum().backward()
    layers = lora_parameters(policy.transformer)
    assert lora_modules(policy.transformer) and all(bool(p.grad.any()) for p in layers.values())
    save_lora(tmp_path, policy.transformer, alpha=5.0)
    asked = {**arguments(stock, family, sampling, prompt), "latents": policy.stock_latents(start, 32)}
    base = last_latents(stock, **asked)
    stock.load_lora_weights(tmp_path)
    try:
        theirs = last_latents(stock, **asked)
    finally:
        stock.unload_lora_weights()
    assert (sampled(policy, start, branches, sampling) - theirs).abs().max() < 2e-5 < (base - theirs).abs().max()


def test_processes_of_parts_and_random_weights_have_the_same_arrays(
    family: str, policy: Any, images: list[Any]
) -> None:
    prompt = prompt_of(images[1])
    (whole,) = policy.encode([prompt.wording])
    (alone,) = policy_of(family, parts="text").encode([prompt.wording])
    assert whole.keys() == alone.keys() and all(np.array_equal(whole[name], alone[name]) for name in whole)
    model = resolve_model(replace(model_config(family), weights="random", dtype="float32"))
    (drawn,) = load_policy(model, dtype="float32", device="cpu", parts="all").encode([prompt.wording])
    assert {name: array.shape[-1] for name, array in drawn.items()} == {n: a.shape[-1] for n, a in whole.items()}
    planned = shapes_of(model, 32, 1).conditioning
    assert {name: array.shape for name, array in drawn.items()} == planned


@pytest.mark.slow
@pytest.mark.parametrize("family", ["flux_kontext"], indirect=True)
def test_image_sizes_are_those_of_the_stock_table(policy: Any, stock: Any, images: list[Any], monkeypatch: Any) -> None:
    """Which has a size of about 1024 × 1024 pixels for every shape; a token of the tiny model has 32 × 32."""
    monkeypatch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", PUBLISHED)
    branches = [encoded(policy, prompt_of(image)) for image in images]
    assert [tuple(pair[0]["image_0"].shape) for pair in branches] == [(22, 45, 64), (37, 27, 64)]
    start, sampling = torch.zeros(1, *policy.latent_shape(32)), how("flux_kontext", steps=STEPS)
    given = arguments(stock, "flux_kontext", sampling, prompt_of(images[0]))
    theirs = last_latents(stock, latents=policy.stock_latents(start, 32), **given)
    assert (sampled(policy, start, branches[0], sampling) - theirs).abs().max() < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", ["flux2_klein"], indirect=True)
@pytest.mark.parametrize("size", [(2100, 700), (67, 500)])
def test_larger_images_are_scaled_and_cut_as_by_the_stock_pipeline(
    size: tuple[int, int], policy: Any, stock: Any, tmp_path: Path
) -> None:
    coarse = np.random.default_rng(0).integers(0, 255, (9, 7, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize(size[::-1]).save(tmp_path / "a.png")
    prompt = prompt_of(examined(tmp_path / "a.png"))
    branches = encoded(policy, prompt)
    rows, columns = {2100: (110, 36), 67: (4, 31)}[size[0]]
    assert branches[0]["image_0"].shape == (rows, columns, 128)
    start, sampling = torch.zeros(1, *policy.latent_shape(32)), how("flux2_klein", steps=STEPS)
    given = arguments(stock, "flux2_klein", sampling, prompt)
    theirs = last_latents(stock, latents=policy.stock_latents(start, 32), **given)
    assert (sampled(policy, start, branches, sampling) - theirs).abs().max() < 2e-5


def test_the_schedule_of_klein_depends_on_tokens_and_steps() -> None:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0)
    transformer: Any = SimpleNamespace(config=None)
    policy = Flux2KleinPolicy(transformer, scheduler, side=16, dtype=torch.float32)
    for steps, tokens in itertools.product((4, 10, 50), (1, 4, 1024, 4096, 4300, 4301, 16384)):
        found = policy.sigmas(steps, (16, 16 * tokens))
        mu = pipeline_flux2_klein.compute_empirical_mu(tokens, steps)
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
        assert torch.equal(found, scheduler.sigmas), (steps, tokens)


@pytest.mark.parametrize("family", ["flux_kontext"], indirect=True)
def test_kontext_takes_one_image(policy: Any, images: list[Any]) -> None:
    for wrong, said in (([], "needs at least 1 image"), (images, "takes at most 1 image")):
        with pytest.raises(ValueError, match=said):
            policy.encode([prompt_of(*wrong).wording])


def test_what_it_cannot_do_is_refused(family: str, images: list[Any]) -> None:
    check = PromptCheck(resolve_model(model_config(family)))
    prompt = replace(prompt_of(images[0]), negative=None)
    check(prompt)
    sizes, said = {
        "flux_kontext": ([(31, 300)], "32 px at least, got 31"),
        "flux2_klein": ([(63, 300), (1000, 120)], "64 px at least, one at most 8"),
    }[family]
    for size in sizes:
        with pytest.raises(ValueError, match=said):
            check(replace(prompt, images=(replace(images[0], size=size),)))


def test_generate_refuses_an_image_without_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("RGB", (40, 10)).save(tmp_path / "flat.png")
    given = ["--model", resolve_model(model_config("flux_kontext")).path, "--image", str(tmp_path / "flat.png")]
    assert generate.main([*given, "--prompt", TEXT, "--out", str(tmp_path / "out.png")]) == 2
    assert "got 10 × 40" in capsys.readouterr().err and not (tmp_path / "out.png").exists()


def test_klein_takes_texts_of_any_length() -> None:
    prepared("model=tiny_flux2_klein", "model.max_sequence_length=600")


def test_klein_takes_no_negative_prompt(images: list[Any]) -> None:
    """Neither of a row nor of the settings; a distilled one takes no guidance."""
    klein = load_family("flux2_klein")
    check_images_of(klein, Prompt(0, TEXT, negative=" ", images=tuple(images)))
    with pytest.raises(ValueError, match="takes no negative prompt"):
        check_images_of(klein, prompt_of())
    with pytest.raises(ValueError, match=r"leave out rollout\.negative_prompt"):
        prepared("model=tiny_flux2_klein", "rollout.negative_prompt=grey")


def test_a_distilled_klein_has_no_guidance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = resolve_model(model_config("flux2_klein"))
    shutil.copytree(model.path, tmp_path / "distilled")
    index = tmp_path / "distilled" / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "is_distilled": True}))
    path = str(index.parent)
    prepared(f"model.path={path}", "evaluate.baseline=true", "evaluate.every=1")
    for key in ("rollout.true_cfg_scale", "algorithm.reference_cfg_scale"):
        with pytest.raises(ValueError, match=f"{re.escape(key)} must be 1, got 4"):
            prepared(f"model.path={path}", "algorithm=diffusion_nft", f"{key}=4")
    assert resolve_model(ModelConfig(path=path)).usual_guidance == (1.0, 0.0)
    out = tmp_path / "out.png"
    assert generate.main(["--model", path, "--prompt", TEXT, "--true-cfg-scale", "4", "--out", str(out)]) == 2
    assert not out.exists()
    small = [path, "--resolution", "32", "--num-inference-steps", "2", "--max-sequence-length", "24"]
    assert check_model.main([*small, "--guidance", "4"]) == 2
    monkeypatch.setattr(checked, "cache_dir", lambda: tmp_path)
    assert check_model.main(small) == 0


def prepared(*settings: str) -> None:
    usual = ["reward=jpeg_compressibility", "data=two_prompts"]
    prepare(precheck(compose_config("sync", [*usual, *settings])))
