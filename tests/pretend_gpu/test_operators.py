"""Tests of the operators that both pools run on the device: each has a deterministic CUDA form, in every family."""

from collections.abc import Iterator

import pytest
import torch
from pretended import report
from pretended.library import call

from async_flowrl.config.schema import Config
from async_flowrl.policies.lora import add_lora
from async_flowrl.policies.registry import load_policy, resolve_model
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from tests.support import trainer_rig as rig
from tests.support.families import NAMES, how, model_config
from tests.support.tiny import request


@pytest.fixture(autouse=True)
def from_nothing() -> Iterator[None]:
    call("forget_operators")
    yield
    torch.use_deterministic_algorithms(False)
    call("forget_operators")


def settings(family: str) -> Config:
    config = rig.tiny_config()
    config.model = model_config(family)
    config.rollout.guidance_scale = 3.5 if family == "flux" else 0.0
    return config


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("family", NAMES)
def test_the_rollouts(family: str, guidance: float) -> None:
    """Text encoders, network, schedule and decoder."""
    torch.use_deterministic_algorithms(True)
    config = settings(family)
    policy = load_policy(resolve_model(config.model), dtype="bfloat16", device="cuda", parts="all")
    add_lora(policy.transformer, config.lora, policy, seed=0)
    DiffusersEngine(policy, device="cuda").generate(request(2, how=how(family, cfg=guidance)))
    assert "aten::mm" in report.operators() or "aten::addmm" in report.operators()
    assert report.nondeterministic() == []


@pytest.mark.parametrize("family", NAMES)
def test_the_trainer(family: str) -> None:
    """Forward, backward and optimizer step, attention's backward pass included."""
    config = settings(family)
    handed = [rig.Sampler(config).group(0, index) for index in (0, 1)]
    worker = rig.trainer(config)
    rig.update(worker, 0, handed)
    assert any("scaled_dot_product_attention" in name for name in report.operators())
    assert report.nondeterministic() == []
