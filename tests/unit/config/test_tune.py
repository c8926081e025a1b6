"""Tests of settings that `tune` cannot be combined with: each is refused in one sentence before anything starts."""

from collections.abc import Callable

import pytest

from async_flowrl.config.check import ConfigError, check
from async_flowrl.config.schema import Config, RewardTerm


def config_of(change: Callable[[Config], None], tune: str = "full") -> Config:
    config = Config(tune=tune)
    config.model.dtype = "float32"
    config.reward.terms = {"color": RewardTerm()}
    change(config)
    return config


@pytest.mark.parametrize(
    ("tune", "change", "refusal"),
    [
        ("most", lambda c: None, "tune must be one of full, lora, got 'most'"),
        ("full", lambda c: setattr(c.trainer, "shard", "hybrid"), "trainer.shard=hybrid is for tune=lora"),
        ("full", lambda c: setattr(c.trainer, "cpu_offload", True), "trainer.cpu_offload=true offloads a frozen base"),
        ("full", lambda c: setattr(c.lora, "path", "x"), "lora.path=x is for tune=lora"),
        ("full", lambda c: setattr(c.rollout, "engine", "vllm_omni"), "rollout.engine=diffusers alone"),
        ("lora", lambda c: setattr(c.full, "freeze", ["x"]), "is for tune=full; tune=lora freezes the whole base"),
    ],
)
def test_what_does_not_go_together(tune: str, change: Callable[[Config], None], refusal: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(config_of(change, tune))
    assert refusal in str(refused.value) and "\n" not in str(refused.value)


def test_what_goes_together() -> None:
    check(config_of(lambda c: setattr(c.full, "freeze", ["*norm*"])))
    check(config_of(lambda c: setattr(c.trainer, "shard", "full")))
    check(config_of(lambda c: setattr(c, "placement", "separate"), "lora"))
