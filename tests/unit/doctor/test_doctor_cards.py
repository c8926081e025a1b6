"""Tests of the memory plan of each pool against the GPUs of the nodes on which its workers may sit."""

from typing import Any

import pytest

from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.memory.processes import plan_memory
from async_flowrl.run.findings import FAILED, OK, WARNING
from async_flowrl.run.machines import GIB, Machine
from async_flowrl.run.preflight import device_finding as devices
from async_flowrl.run.preflight import host_processes
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


def test_a_small_card_that_a_pool_may_get_is_named(config: Config) -> None:
    found = devices(config, pools(), [machine("a", LARGE, LARGE), machine("b", SMALL)])
    assert found.status == WARNING and "ray start --num-gpus" in found.advice


def test_processes_that_sample_and_train_are_judged(config: Config) -> None:
    config.placement = "shared"
    both = [PoolSpec("shared", "a:b", 1, gpus_per_worker=1.0)]
    assert devices(config, both, [machine("a", LARGE)]).status == OK
    found = devices(config, both, [machine("a", SMALL)])
    assert found.status == FAILED and "a process that samples and trains holds" in found.sentence


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        (["trainer.shard=full"], 1),
        (["tune=full", "trainer.shard=full"], 4),
    ],
)
def test_the_copy_of_a_checkpoint_counts_for_the_ranks_that_make_one(settings: list[str], copies: int) -> None:
    """The first rank alone, or each its share."""
    config = compose_config("one_step_off", ["trainer.num_workers=4", *settings])
    trainer = next(each for each in host_processes(config, plan_memory(config), on_gpus=True) if each.pool == "trainer")
    assert trainer.copies == copies and trainer.copy > 0
    assert trainer.total == trainer.count * trainer.bytes + copies * trainer.copy
    assert trainer.on_a_node == trainer.bytes + trainer.copy
