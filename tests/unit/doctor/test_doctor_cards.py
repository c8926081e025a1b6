"""Tests of the memory plan of each pool against the GPUs of the nodes on which its workers may sit."""

from typing import Any

import pytest

from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config, RewardTerm
from async_flowrl.memory.processes import plan_memory
from async_flowrl.run.findings import FAILED, OK, SKIPPED, WARNING
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


def test_without_gpus_nothing_is_planned(config: Config) -> None:
    assert devices(config, pools(), [machine("a")]).status == SKIPPED


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


def test_small_cards_alone_are_a_failure(config: Config) -> None:
    found = devices(config, pools(trainers=2), [machine("a", SMALL), machine("b", SMALL)])
    assert found.status == FAILED and "a trainer rank holds" in found.sentence


def test_each_pool_has_its_own_smallest_card(config: Config) -> None:
    """Trainer ranks need two of a node, so that they never get the smaller card that rollout workers may get."""
    found = devices(config, pools(2, workers_per_node=2), [machine("a", LARGE, LARGE), machine("b", 24 * GIB)])
    assert found.status == OK and "trainer 80.0 GiB, rollout 24.0 GiB" in found.sentence


def test_a_run_with_a_cluster_of_its_own_has_all_cards_of_the_machine(config: Config) -> None:
    here = Machine("here", {"gpus": [{"name": "H100", "memory": LARGE}]})
    assert devices(config, pools(), [here]).status == OK


def test_processes_that_sample_and_train_are_judged(config: Config) -> None:
    config.placement = "shared"
    both = [PoolSpec("shared", "a:b", 1, gpus_per_worker=1.0)]
    assert devices(config, both, [machine("a", LARGE)]).status == OK
    found = devices(config, both, [machine("a", SMALL)])
    assert found.status == FAILED and "a process that samples and trains holds" in found.sentence


def test_pools_of_held_out_terms_are_judged(config: Config) -> None:
    config.evaluate.reward.terms = {"liked": RewardTerm(name="pickscore", gpus_per_worker=1.0)}
    apart = [PoolSpec("held_out/liked", "a:b", 1, gpus_per_worker=1.0)]
    found = devices(config, apart, [machine("a", SMALL)])
    assert found.status == FAILED and "evaluate.reward.terms.liked.gpus_per_worker" in found.sentence


@pytest.mark.parametrize(
    ("settings", "copies"),
    [
        ([], 1),
        (["trainer.num_workers=1"], 1),
        (["trainer.shard=full"], 1),
        (["trainer.shard=hybrid", "trainer.shard_size=2"], 1),
        (["tune=full"], 1),
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
