"""Tests of what `model.quantize` and `model.quantize_text_encoder` cannot be combined with."""

import pytest

from async_flowrl.config.check import ConfigError, check
from async_flowrl.config.compose import compose_config
from async_flowrl.memory.trainer_layout import candidates

BASE, TEXT = "model.quantize=nf4", "model.quantize_text_encoder=int8"
VLLM = "rollout.engine=vllm_omni"


@pytest.mark.parametrize(
    "overrides",
    [
        (BASE, "tune=full"),
        (BASE, "trainer.shard=full", "trainer.num_workers=2"),
        (BASE, "trainer.shard=hybrid", "trainer.shard_size=2", "trainer.num_workers=4"),
        (BASE, "trainer.cpu_offload=true"),
        (BASE, VLLM),
        (TEXT, VLLM),
        (TEXT, "model.weights=random"),
    ],
    ids=" ".join,
)
def test_a_refusal_names_both_settings(overrides: tuple[str, ...]) -> None:
    setting, other = overrides[:2]
    with pytest.raises(ConfigError, match=setting) as refusal:
        check(compose_config(overrides=list(overrides)))
    assert other.rpartition("=")[0] in str(refusal.value)
    check(compose_config(overrides=[setting, "model.path=tiny"]))


@pytest.mark.extended
def test_ranks_with_a_quantised_base_hold_all_of_it() -> None:
    ranks = ["trainer.num_workers=2", "trainer.shard=auto"]
    assert not any(config.is_sharded for config in candidates(compose_config(overrides=[*ranks, BASE])))
    assert any(config.is_sharded for config in candidates(compose_config(overrides=ranks)))
