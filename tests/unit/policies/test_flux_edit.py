"""Tests of FLUX.1-Kontext and FLUX.2-klein: their sizes, the schedule of klein, and what they cannot do."""

import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.flux2 import pipeline_flux2_klein

from async_flowrl.cli import check_model, generate
from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import ModelConfig
from async_flowrl.policies import checked
from async_flowrl.policies.flux2_klein import Flux2KleinPolicy
from async_flowrl.policies.registry import (
    PromptCheck,
    check_images_of,
    load_family,
    resolve_model,
)
from async_flowrl.run.precheck import precheck
from async_flowrl.run.prepare import prepare
from async_flowrl.types import Prompt
from tests.support.families import model_config

TEXT = "make the house blue"


def test_the_schedule_of_klein_depends_on_tokens_and_steps() -> None:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0)
    transformer: Any = SimpleNamespace(config=None)
    policy = Flux2KleinPolicy(transformer, scheduler, side=16, dtype=torch.float32)
    for steps, tokens in itertools.product((4, 10, 50), (1, 4, 1024, 4096, 4300, 4301, 16384)):
        found = policy.sigmas(steps, (16, 16 * tokens))
        mu = pipeline_flux2_klein.compute_empirical_mu(tokens, steps)
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
        assert torch.equal(found, scheduler.sigmas), (steps, tokens)


@pytest.mark.parametrize(
    ("family", "size", "said"),
    [
        ("flux_kontext", (31, 300), "32 px at least, got 31"),
        ("flux2_klein", (63, 300), "64 px at least, one at most 8"),
        ("flux2_klein", (1000, 120), "64 px at least, one at most 8"),
    ],
)
def test_sizes_that_it_cannot_edit_are_refused(family: str, size: tuple[int, int], said: str, images: Any) -> None:
    check, image = PromptCheck(resolve_model(model_config(family))), images[0]
    check(Prompt(0, TEXT, images=(image,)))
    with pytest.raises(ValueError, match=said):
        check(Prompt(0, TEXT, images=(replace(image, size=size),)))


def test_klein_takes_texts_of_any_length() -> None:
    prepared("model=tiny_flux2_klein", "model.max_sequence_length=600")


def test_klein_takes_no_negative_prompt(images: Any) -> None:
    """Neither of a row nor of the settings; a distilled one takes no guidance."""
    klein = load_family("flux2_klein")
    check_images_of(klein, Prompt(0, TEXT, negative=" ", images=tuple(images)))
    with pytest.raises(ValueError, match="takes no negative prompt"):
        check_images_of(klein, Prompt(0, TEXT, negative="grey"))
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
