"""Tests of the configurations for which `placement=shared` is not advised."""

import pytest

from async_flowrl.config.check import check, sharing_refusal
from async_flowrl.config.schema import Config, RewardConfig, RewardTerm


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rollout.engine", "vllm_omni"),
        ("trainer.shard", "full"),
        ("trainer.cpu_offload", True),
        ("rollout.min_workers", 1),
        ("checkpoint_engine.transport", "gloo"),
        ("runtime.backend", "local"),
    ],
)
def test_sharing_is_not_advised_where_it_would_be_refused(key: str, value: object) -> None:
    """Such a configuration runs with two pools."""
    config = Config(reward=RewardConfig(terms={"color": RewardTerm()}))
    assert sharing_refusal(config, 2) is None
    section, _, name = key.partition(".")
    setattr(getattr(config, section), name, value)
    if key == "rollout.min_workers":
        config.runtime.address = "auto"
    check(config)
    assert sharing_refusal(config, 2) is not None
