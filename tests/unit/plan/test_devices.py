"""Comparison of the plan with the devices found."""

import pytest

from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.plan.devices import check_devices
from async_flowrl.plan.memory import plan_memory

GIB = 2**30


def small(*overrides: str) -> Config:
    """A model of 80 MB in float32, with three trainer ranks' worth of settings."""
    sizes = ["model.tiny.layers=4", "model.tiny.heads=24", "lora.rank=64", "model.dtype=float32"]
    return compose_config("one_step_off", [*sizes, *overrides])


def test_a_device_smaller_than_what_lasts_is_refused_with_what_would_make_it_fit() -> None:
    config = small("trainer.num_workers=2", "trainer.shard=none")
    plan = plan_memory(config)
    enough = {"trainer": 80 * GIB, "rollout": 80 * GIB}
    assert check_devices(config, enough) == []
    short = plan.trainer.resident - 1
    with pytest.raises(ConfigError) as refused:
        check_devices(config, {**enough, "trainer": short})
    said = str(refused.value)
    assert "a trainer rank holds" in said and "base weights" in said and "optimizer" in said
    assert "it would fit with trainer.shard=full (" in said and "allow_oom=true tries anyway" in said
    assert said.count(" GiB)") == 3
    with pytest.raises(ConfigError, match=r"a rollout worker holds .* rollout.text_encoder=offload"):
        check_devices(config, {**enough, "rollout": plan.rollout.resident - 1})


def test_what_a_refusal_names_does_fit() -> None:
    pair = ("trainer.num_workers=2", "trainer.shard=none")
    short = plan_memory(small(*pair)).trainer.resident - 1
    for change in ("trainer.shard=full", "trainer.cpu_offload=true", "model.dtype=bfloat16", "lora.rank=32"):
        assert plan_memory(small(*pair, change), short).trainer.resident <= short


def test_allow_oom_warns_and_goes_on() -> None:
    config = small("allow_oom=true")
    (warning,) = check_devices(config, {"trainer": 80 * GIB, "rollout": 1000})
    assert "a rollout worker holds" in warning


def test_a_tight_device_is_warned_of() -> None:
    config = small()
    total = plan_memory(config).trainer.total
    assert check_devices(config, {"trainer": round(total / 0.89)}) == []
    (warning,) = check_devices(config, {"trainer": round(total / 0.91)})
    assert "a trainer rank is planned to need" in warning and "91%" in warning and "activations" in warning


def test_colocated_pools_share_a_device_and_fractions_have_their_share() -> None:
    config = small("placement=colocated", "max_staleness=0", "mode=null", "hand_over=batch")
    plan = plan_memory(config)
    both = plan.trainer.resident + plan.rollout.resident
    with pytest.raises(ConfigError, match="a trainer rank with a rollout worker holds"):
        check_devices(config, {"trainer": both - 1, "rollout": both - 1})
    halved = small("rollout.gpus_per_worker=0.5")
    with pytest.raises(ConfigError, match="a rollout worker holds"):
        check_devices(halved, {"rollout": round(plan_memory(halved).rollout.resident * 1.5)})


def test_a_model_that_cannot_be_planned_is_said_and_runs() -> None:
    config = small("model.family=tests.support.toy_models:Nothing")
    (warning,) = check_devices(config, {"trainer": GIB})
    assert "was not compared with a plan" in warning
