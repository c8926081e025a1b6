"""Tests of the comparison of the memory plan with the devices found."""

import pytest

from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.memory.devices import check_devices
from async_flowrl.memory.footprints import planned_rollout, planned_trainer

GIB = 2**30


def small(*overrides: str) -> Config:
    """A model of one layer in float32, with three trainer ranks' worth of settings."""
    sizes = ["model.tiny.layers=1", "model.tiny.heads=24", "lora.rank=64", "model.dtype=float32"]
    return compose_config("one_step_off", [*sizes, *overrides])


def lasting(config: Config) -> tuple[int, int]:
    """Bytes that last of a trainer rank and of a rollout worker, without the activations, which take long to count."""
    return planned_trainer(config, lasting=True).resident, planned_rollout(config, lasting=True).resident


@pytest.mark.extended
def test_a_device_smaller_than_what_lasts_is_refused_with_what_would_make_it_fit() -> None:
    pair = ("trainer.num_workers=2", "trainer.micro_batch_size=8", "trainer.shard=none")
    config = small(*pair)
    rank, worker = lasting(config)
    enough = {"trainer": 80 * GIB, "rollout": 80 * GIB}
    assert check_devices(config, enough) == []
    short = rank - 1
    with pytest.raises(ConfigError) as refused:
        check_devices(config, {**enough, "trainer": short})
    said = str(refused.value)
    assert "a trainer rank needs" in said and "base weights" in said and "optimizer" in said
    assert "it would fit with trainer.shard=full (" in said and "allow_oom=true tries anyway" in said
    assert said.count(" GiB)") == 1
    with pytest.raises(ConfigError, match=r"a rollout worker needs .* rollout.text_encoder=offload"):
        check_devices(config, {**enough, "rollout": worker - 1})
    for change in ("trainer.shard=full", "model.dtype=bfloat16"):
        assert lasting(small(*pair, change))[0] <= short


@pytest.mark.extended
def test_fractions_have_their_share() -> None:
    halved = small("rollout.gpus_per_worker=0.5")
    with pytest.raises(ConfigError, match="a rollout worker needs"):
        check_devices(halved, {"rollout": round(lasting(halved)[1] * 1.5)})
