"""Tests of the memory plan of each pool against the GPUs of the nodes on which its workers may sit."""

from typing import Any

import pytest

from async_flowrl.config.schema import Config
from async_flowrl.run.findings import FAILED, OK
from async_flowrl.run.machines import GIB, Machine
from async_flowrl.run.preflight import device_finding as devices
from separation.group import PoolSpec

LARGE, SMALL = 80 * GIB, 2**20
"""The small model needs more than the one and much less than the other."""


def machine(name: str, *memory: int, gpus: float | None = None, cpus: float = 64.0) -> Machine:
    """A node of a cluster; `gpus` are those that Ray has of it, None: as many as there are."""
    cards = [{"name": "H100", "memory": size} for size in memory]
    return Machine(name, {"gpus": cards}, resources={"CPU": cpus, "GPU": float(len(memory) if gpus is None else gpus)})


def pools(trainers: int = 1, rollouts: int = 1, **of_the_trainer: Any) -> list[PoolSpec]:
    return [
        PoolSpec("trainer", "a:b", trainers, gpus_per_worker=1.0, **of_the_trainer),
        PoolSpec("rollout", "a:b", rollouts, gpus_per_worker=1.0),
        PoolSpec("reward", "a:b", 1),
    ]


@pytest.fixture
def config() -> Config:
    made = Config()
    made.model.dtype = "float32"
    return made


def test_a_small_card_that_no_pool_can_get_does_not_count(config: Config) -> None:
    """The head's, which Ray was told not to use; one on a node that cannot hold a pool's workers of a node."""
    large = [machine("a", LARGE, LARGE), machine("b", LARGE)]
    found = devices(config, pools(), [*large, machine("head", SMALL, gpus=0)])
    assert found.status == OK and "trainer 80.0 GiB, rollout 80.0 GiB" in found.sentence
    two_of_a_node = pools(2, workers_per_node=2)[:1]
    assert devices(config, two_of_a_node, [large[0], machine("b", SMALL)]).status == OK


def test_processes_that_sample_and_train_are_judged(config: Config) -> None:
    config.placement = "shared"
    both = [PoolSpec("shared", "a:b", 1, gpus_per_worker=1.0)]
    assert devices(config, both, [machine("a", LARGE)]).status == OK
    found = devices(config, both, [machine("a", SMALL)])
    assert found.status == FAILED and "a process that samples and trains needs" in found.sentence
