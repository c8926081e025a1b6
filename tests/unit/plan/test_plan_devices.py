"""Tests of the comparison of the memory plan with the devices found."""

import pytest

from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.memory import rehearsed
from async_flowrl.memory.devices import check_devices
from async_flowrl.memory.processes import plan_memory, planned_rollout, planned_trainer
from async_flowrl.memory.rehearsed import model_sizes

GIB = 2**30


def small(*overrides: str) -> Config:
    """A model of 80 MB in float32, with three trainer ranks' worth of settings."""
    sizes = ["model.tiny.layers=4", "model.tiny.heads=24", "lora.rank=64", "model.dtype=float32"]
    return compose_config("one_step_off", [*sizes, *overrides])


def lasting(config: Config) -> tuple[int, int]:
    """Bytes that last of a trainer rank and of a rollout worker, without the activations, which take long to count."""
    return planned_trainer(config, lasting=True).resident, planned_rollout(config, lasting=True).resident


def test_a_device_smaller_than_what_lasts_is_refused_with_what_would_make_it_fit() -> None:
    config = small("trainer.num_workers=2", "trainer.micro_batch_size=8", "trainer.shard=none")
    rank, worker = lasting(config)
    enough = {"trainer": 80 * GIB, "rollout": 80 * GIB}
    assert check_devices(config, enough) == []
    short = rank - 1
    with pytest.raises(ConfigError) as refused:
        check_devices(config, {**enough, "trainer": short})
    said = str(refused.value)
    assert "a trainer rank holds" in said and "base weights" in said and "optimizer" in said
    assert "it would fit with trainer.shard=full (" in said and "allow_oom=true tries anyway" in said
    assert said.count(" GiB)") == 1
    with pytest.raises(ConfigError, match=r"a rollout worker holds .* rollout.text_encoder=offload"):
        check_devices(config, {**enough, "rollout": worker - 1})


def test_what_a_refusal_names_does_fit() -> None:
    pair = ("trainer.num_workers=2", "trainer.shard=none")
    short = lasting(small(*pair))[0] - 1
    for change in ("trainer.shard=full", "model.dtype=bfloat16", "lora.rank=32"):
        assert lasting(small(*pair, change))[0] <= short


def test_a_refusal_names_no_setting_that_would_be_refused_itself() -> None:
    """`max_staleness=0` alone is refused with mode=one_step_off, 32 ranks cannot share 16 images, and a base with
    shard=none is never offloaded."""
    refused_themselves = ("max_staleness=0", "trainer.num_workers=32", "trainer.cpu_offload=true")
    ranks = ("trainer.num_workers=16", "trainer.micro_batch_size=1")
    for given in (ranks, (*ranks, "trainer.shard=none", "lora.rank=1")):
        with pytest.raises(ConfigError) as refused:
            check_devices(small(*given), {"trainer": 1000})
        named = [each for each in refused_themselves if f" {each} (" in str(refused.value)]
        assert named == (["trainer.cpu_offload=true"] if "trainer.shard=none" not in given else [])
    smallest = ("model=tiny_sana", "lora.rank=1", "model.dtype=bfloat16", "rollout.text_encoder=offload")
    with pytest.raises(ConfigError, match=r"not little enough, with max_staleness=0 mode=stream \("):
        check_devices(small(*smallest), {"rollout": 1000})
    fresh = ("mode=stream", "max_staleness=0")
    with pytest.raises(ConfigError, match=r"no single setting would make it need less"):
        check_devices(small(*smallest, *fresh), {"rollout": 1000})


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


def test_fractions_have_their_share() -> None:
    halved = small("rollout.gpus_per_worker=0.5")
    with pytest.raises(ConfigError, match="a rollout worker holds"):
        check_devices(halved, {"rollout": round(lasting(halved)[1] * 1.5)})


def test_threads_of_one_process_share_its_device() -> None:
    config = small("runtime.backend=local", "rollout.num_workers=3")
    rank, worker = lasting(config)
    together = rank + 3 * worker
    with pytest.raises(ConfigError, match="with all rollout workers of its process holds"):
        check_devices(config, {"trainer": together - 1, "rollout": together - 1})
    assert all("holds" not in said for said in check_devices(config, {"trainer": together, "rollout": together}))


def test_whether_ranks_shard_is_asked_of_the_whole_device_as_the_trainer_does() -> None:
    """A rank with .8 of a device that the base takes half of holds it whole."""
    config = small("trainer.num_workers=2", "trainer.gpus_per_worker=0.8", "lora.rank=1")
    base = model_sizes(config).base_bytes
    (tight,) = check_devices(config, {"trainer": 2 * base})
    assert f"base weights {base / GIB:.3g}" in tight and "gathered" not in tight


def test_a_model_that_cannot_be_planned_is_said_and_runs() -> None:
    config = small("model.family=tests.support.toy_rollout:Nothing")
    (warning,) = check_devices(config, {"trainer": GIB})
    assert "was not compared with a plan" in warning


def test_a_network_that_fails_in_the_rehearsal_is_said_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def reads_a_value(*_: object) -> int:
        raise NotImplementedError("no value")

    monkeypatch.setattr(rehearsed, "_once", reads_a_value)
    (warning,) = check_devices(small("lora.rank=3"), {"trainer": 80 * GIB})
    assert warning.endswith("was not compared with a plan: NotImplementedError: no value")
