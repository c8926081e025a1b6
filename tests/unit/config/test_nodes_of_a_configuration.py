"""Tests of workers per node: a configuration that cannot be placed is refused in one sentence."""

from async_flowrl.config.check import check
from async_flowrl.config.compose import compose_config

CLUSTER = "runtime.address=auto"


def test_whole_nodes_are_accepted() -> None:
    check(compose_config("one_step_off", [CLUSTER, "trainer.num_workers=16", "trainer.workers_per_node=8"]))
    check(compose_config("one_step_off", ["rollout.num_workers=2", "rollout.workers_per_node=2"]))
