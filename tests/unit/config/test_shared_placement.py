"""Tests of settings that placement=shared cannot be combined with."""

import pytest

from async_flowrl.config.check import ConfigError, check
from async_flowrl.config.compose import compose_config

REFUSED = {
    "trainer.num_workers=2": "trainer.num_workers and rollout.num_workers must be equal, got 2 and 1",
    "rollout.threads=3": "trainer.threads and rollout.threads must be equal, got 1 and 3",
    "trainer.gpus_per_worker=0.5": "trainer.gpus_per_worker and rollout.gpus_per_worker must be equal, got 0.5 and 1",
    "trainer.shard=full": "trainer.shard must be none or auto without trainer.cpu_offload, got trainer.shard=full",
    "trainer.shard=hybrid": "trainer.shard must be none or auto without trainer.cpu_offload, got trainer.shard=hybrid",
    "trainer.cpu_offload=true": "got trainer.cpu_offload=true",
    "checkpoint_engine.transport=gloo": "checkpoint_engine.transport must be object_store or auto, got gloo",
    "rollout.max_workers=4": "leave rollout.min_workers and rollout.max_workers out",
    "rollout.engine=vllm_omni": "needs placement=separate, got shared",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_is_refused(override: str) -> None:
    config = compose_config("one_step_off", ["placement=shared", override])
    with pytest.raises(ConfigError, match="placement=s") as told:
        check(config)
    assert REFUSED[override] in str(told.value)


def test_an_environment_of_one_process_says_one_thing() -> None:
    def given(value: int) -> list[str]:
        return ["placement=shared", "+trainer.environment={LEVEL: 1}", f"+rollout.environment={{LEVEL: {value}}}"]

    check(compose_config("one_step_off", given(1)))
    with pytest.raises(ConfigError, match=r"LEVEL is 1 in trainer\.environment, 2 in rollout\.environment"):
        check(compose_config("one_step_off", given(2)))


@pytest.mark.parametrize("mode", ["sync", "stream", "one_step_off", "fully_async"])
def test_every_mode_may_share(mode: str) -> None:
    for shard in ("auto", "none"):
        pools = ["trainer.num_workers=3", "rollout.num_workers=3", f"trainer.shard={shard}"]
        check(compose_config(mode, ["placement=shared", *pools]))
