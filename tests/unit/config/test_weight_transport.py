"""Tests of transport settings that are refused before anything starts, besides those on shared devices."""

import pytest

from async_flowrl.config.check import ConfigError, check, nccl_obstacle
from async_flowrl.config.compose import compose_config


def test_weights_that_arrive_in_host_memory_do_not_come_by_nccl() -> None:
    config = compose_config(overrides=["rollout.engine=vllm_omni"])
    assert nccl_obstacle(config) == "rollout.engine=vllm_omni receives weights in host memory"


def test_a_group_that_may_take_longer_than_its_lane_is_waited_for_is_refused() -> None:
    short = ["deadlines.publish=30", "rollout.num_workers=9"]
    check(compose_config(overrides=[*short, "checkpoint_engine.transport=object_store"]))
    check(compose_config(overrides=[*short, "checkpoint_engine.transport=auto", "rollout.gpus_per_worker=0"]))
    for transport in ("gloo", "nccl", "auto"):
        with pytest.raises(ConfigError, match=r"deadlines.publish=30 leaves no time .* 9 rollout .* may take 61 s by"):
            check(compose_config(overrides=[*short, f"checkpoint_engine.transport={transport}"]))
        enough = ["checkpoint_engine.setup_seconds=20", f"checkpoint_engine.transport={transport}"]
        check(compose_config(overrides=[*short, *enough]))
