"""Tests of workers that may share a device, and of workers per node."""

from dataclasses import replace

import pytest

from async_flowrl.config.check import ConfigError, check, may_share, nccl_obstacle
from async_flowrl.config.compose import compose_config

SHARED = {
    "threads": (("runtime.backend=local",), "runtime.backend=local has all workers in one process"),
    "trainer on the CPU": (("trainer.gpus_per_worker=0",), "trainer.gpus_per_worker=0 leaves its workers on the CPU"),
    "rollout on the CPU": (("rollout.gpus_per_worker=0",), "rollout.gpus_per_worker=0 leaves its workers on the CPU"),
    "a trainer's versions on the host": (("trainer.versions_on=host",), "(trainer.versions_on)"),
    "one of each": (("trainer.gpus_per_worker=0.3", "rollout.gpus_per_worker=0.7"), "fit on one device"),
    "two rollout workers": (
        ("rollout.num_workers=2", "rollout.gpus_per_worker=0.5"),
        "rollout.gpus_per_worker=0.5 lets several rollout workers share a device",
    ),
}
APART = [
    [],
    ["trainer.gpus_per_worker=0.6", "rollout.gpus_per_worker=0.6", "rollout.num_workers=3"],
    ["rollout.gpus_per_worker=0.5"],
]


@pytest.mark.parametrize("case", SHARED)
def test_nccl_is_refused_where_two_of_its_ranks_may_meet_on_one_device(case: str) -> None:
    overrides, reason = SHARED[case]
    config = compose_config(overrides=list(overrides))
    assert reason in str(nccl_obstacle(config))
    check(config)
    for transport in ("nccl", "pynccl"):
        engine = replace(config.checkpoint_engine, transport=transport)
        with pytest.raises(
            ConfigError, match=f"checkpoint_engine.transport={transport} needs a GPU of its own"
        ) as told:
            check(replace(config, checkpoint_engine=engine))
        assert reason in str(told.value) and "use gloo, object_store or auto" in str(told.value)


@pytest.mark.extended
@pytest.mark.parametrize("overrides", APART)
def test_nccl_is_allowed_where_every_worker_has_a_device_of_its_own(overrides: list[str]) -> None:
    config = compose_config(overrides=[*overrides, "checkpoint_engine.transport=nccl"])
    assert nccl_obstacle(config) is None
    check(config)


def test_shares_of_a_device() -> None:
    assert may_share(0.5, 0.5) and may_share(0.1 + 0.2, 0.7)
    assert not may_share(0.5, 0.6) and not may_share(0, 0.5) and not may_share(1, 0)


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
