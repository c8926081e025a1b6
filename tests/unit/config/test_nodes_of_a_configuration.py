"""Tests of workers per node: a configuration that cannot be placed is refused in one sentence."""

import pytest

from async_flowrl.config.check import ConfigError, check
from async_flowrl.config.compose import compose_config

CLUSTER = "runtime.address=auto"
EIGHT_HUNDRED = ("rollout.num_workers=800", "checkpoint_engine.transport=nccl")


def test_a_group_with_one_worker_of_each_node_is_set_up_in_its_own_time() -> None:
    """Of 800 workers on 100 nodes it has 100, and so much time is left within deadlines.publish."""
    check(compose_config("one_step_off", [CLUSTER, *EIGHT_HUNDRED, "rollout.workers_per_node=8"]))
    with pytest.raises(ConfigError, match=r"deadlines\.publish.* 800 "):
        check(compose_config("one_step_off", [CLUSTER, *EIGHT_HUNDRED]))


def test_whole_nodes_are_accepted() -> None:
    check(compose_config("one_step_off", [CLUSTER, "trainer.num_workers=16", "trainer.workers_per_node=8"]))
    check(compose_config("one_step_off", ["rollout.num_workers=2", "rollout.workers_per_node=2"]))
