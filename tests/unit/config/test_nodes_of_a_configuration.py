"""Tests of workers per node: a configuration that cannot be placed is refused in one sentence."""

import pytest

from async_flowrl.config.check import ConfigError, check
from async_flowrl.config.compose import compose_config
from async_flowrl.run.nodes import runs

CLUSTER = "runtime.address=auto"
HYBRID = ("trainer.shard=hybrid", "trainer.shard_size=4")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ((CLUSTER, "trainer.num_workers=4", "trainer.workers_per_node=3"), "3 or 6 workers fit"),
        ((CLUSTER, "rollout.num_workers=2", "rollout.workers_per_node=4"), "4 workers fit"),
        (("trainer.num_workers=4", "trainer.workers_per_node=2"), "asks for 2 nodes, and without runtime.address"),
        (("runtime.backend=local", "rollout.workers_per_node=1"), "runtime.backend=local has threads of one process"),
        ((CLUSTER, "trainer.workers_per_node=0"), "trainer.workers_per_node must be"),
        (
            (CLUSTER, "trainer.num_workers=12", "trainer.workers_per_node=6", *HYBRID),
            "trainer.shard_size=4 must divide trainer.workers_per_node=6",
        ),
    ],
)
def test_what_cannot_be_placed_is_refused(overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(compose_config("one_step_off", list(overrides)))
    assert sentence in str(refused.value)


def test_whole_nodes_are_accepted() -> None:
    check(compose_config("one_step_off", [CLUSTER, "trainer.num_workers=16", "trainer.workers_per_node=8"]))
    check(compose_config("one_step_off", ["rollout.num_workers=2", "rollout.workers_per_node=2"]))


def test_neighbours_are_written_as_a_range() -> None:
    assert runs([0, 1, 2, 5, 7, 8]) == ["0…2", "5", "7…8"] and runs([]) == []
