"""Tests that dry_run refuses what the loaded workers would refuse of a model, for every shipped family, and no more.

Published models have their own sizes and one block of each kind; their weights are on the meta device.
"""

import inspect
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import diffusers
import pytest

from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import compose_config
from async_flowrl.config.models import architectures
from async_flowrl.config.paths import config_dir
from async_flowrl.config.resolution import configured
from async_flowrl.config.schema import Config
from async_flowrl.policies import one_base
from async_flowrl.policies.one_base import OneBase
from async_flowrl.policies.registry import load_family, load_policy, resolve_model
from async_flowrl.rollout.registry import load_engine
from async_flowrl.rollout.vllm_omni.engine_settings import FAMILIES, check_model, network_shapes
from async_flowrl.run.precheck import precheck
from async_flowrl.run.prepare import prepare
from async_flowrl.tickets.request import evaluation_sampling, sampling
from async_flowrl.training import rank_model
from async_flowrl.training.parts import World
from async_flowrl.training.trainer_worker import TrainerWorker
from tests.support.families import NAMES
from tests.support.published import use_published_models

MODELS = [
    name if name == "qwen_image" else pytest.param(name, marks=pytest.mark.slow)
    for name in sorted(file.stem for file in (config_dir() / "model").glob("*.yaml"))
    if ("qwen_image_21" in NAMES or not name.endswith("qwen_image_21"))
    and not any(part in name for part in ("_edit", "kontext", "wan_image"))  # whose prompts need images
    and (not name.startswith("tiny") or name == "tiny_sana")  # the others' families have a published model
]
MODES = ("sync", "stream", "one_step_off", "fully_async")


def published() -> dict[str, dict[str, dict[str, Any]]]:
    """Returns the configuration files of the known models, whole but for the number of blocks and of positions."""
    files = {}
    for path, architecture in architectures().items():
        if architecture.family not in NAMES:
            continue
        family: Any = load_family(architecture.family)
        usual = inspect.signature(getattr(diffusers, family.transformer).__init__).parameters
        whole = {name: each.default for name, each in usual.items() if name != "self"} | dict(architecture.transformer)
        whole |= {"pos_embed_max_size": 16} if architecture.family == "sd3" else {}
        files[path] = {
            "model_index.json": {"_class_name": family.pipeline},
            "transformer/config.json": family.with_stacks(whole, dict.fromkeys(family.stacks(whole), 1)),
            "vae/config.json": dict(architecture.vae),
        }
    return files


@pytest.fixture(autouse=True)
def no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker loads a network without weights, as the first of several ranks before it reads them."""
    use_published_models(tmp_path / "hub", monkeypatch, published())

    def structure(model: Any, *, dtype: str, device: Any, parts: str) -> Any:
        return load_policy(model, dtype=dtype, device=device, parts="structure")

    for module in (rank_model, one_base):
        monkeypatch.setattr(module, "load_policy", structure)
    monkeypatch.setattr(one_base, "base_digest", lambda *_: "")
    for reading in ("digest_of_stored", "stream_base"):
        monkeypatch.setattr(rank_model, reading, lambda *_, **__: "")
    monkeypatch.setattr(World, "current", lambda: World(joined=True))


def said_by_dry_run(config: Config) -> str | None:
    try:
        prepare(precheck(config), whole=True)
    except ConfigError as error:
        return str(error)
    return None


def said_by_trainer(config: Config) -> str | None:
    """Returns the refusal of a trainer rank that loads the model, for which the rollout engine is nothing."""
    try:
        model = resolve_model(config.model)
        base = OneBase(model, parts="structure", device="cpu") if config.placement == "shared" else None
        TrainerWorker(config, model, 0, "trainer-0", configured(config.rollout), base=base).load()
    except ValueError as error:
        return str(error)
    return None


def said_by_rollout(config: Config) -> str | None:
    """Returns the refusal of a rollout worker that loads the model and makes images, for which the mode is nothing."""
    model = resolve_model(config.model)
    base = OneBase(model, parts="structure", device="cpu")
    try:
        if config.rollout.engine == "vllm_omni":
            check_model(config, model)
            network_shapes(config, model)
        else:
            load_engine(config, model, "cpu", base=base)
        for how in (sampling(config), evaluation_sampling(config)):
            base.policy.check(how)
            base.policy.sigmas(how.num_inference_steps, how.resolution)
    except ValueError as error:
        return str(error)
    return None


@cache
def mode_of(mode: str) -> dict[str, Any]:
    """Returns the settings in which a mode differs."""
    composed = compose_config(mode)
    return {key: getattr(composed, key) for key in ("mode", "max_staleness", "hand_over")}


@pytest.mark.parametrize("model", MODELS)
def test_every_model_mode_engine_and_placement(model: str, tmp_path: Path) -> None:
    words = [f"model={model}", f"output_dir={tmp_path / 'run'}"]
    words += ["rollout.resolution=256"] if "sd35" in model else []  # as many positions as are left of its table
    given, answers = compose_config("sync", words), Counter[bool]()
    resolved = resolve_model(given.model)
    given.model.dtype = resolved.dtype
    right, wrong = (3.5, 0.0) if load_family(resolved.family).usual_guidance[1] else (0.0, 3.5)
    known: dict[Any, str | None] = {}
    for mode, guidance in (*product(MODES, (right,)), ("sync", wrong)):
        for engine, placement in product(("diffusers", "vllm_omni"), ("separate", "shared")):
            rollout = replace(given.rollout, engine=engine, guidance_scale=guidance)
            config = replace(given, **mode_of(mode), placement=placement, rollout=rollout)
            said = said_by_dry_run(config)
            if (engine, placement) == ("vllm_omni", "shared"):
                assert said is not None and "placement=separate" in said
                continue
            workers = []
            for says, key in (
                (said_by_trainer, (mode, guidance, placement)),
                (said_by_rollout, (engine, guidance, placement)),
            ):
                if (says, key) not in known:
                    known[says, key] = says(config)
                workers.append(known[says, key])
            assert (said is None) == (workers == [None, None]), (mode, engine, placement, said, workers)
            assert said is None or said in workers
            answers[said is None] += 1
    assert answers[True] == (12 if resolved.family in FAMILIES else 8), "vllm_omni has not all families"
