"""Tests of runs over several nodes: the weights are those of a run on one node, and a wrong token is refused."""

from collections.abc import Callable, Iterator

import pytest

from tests.nodes.node_runs import start
from tests.nodes.pretended_nodes import OUTWARD, Nodes

pytestmark = [pytest.mark.nodes, pytest.mark.serial]

STEPS = 4
SEATS = ({}, {"trainer": 1, "rollout": 1}, {"trainer": 1}, {"rollout": 1})
"""Seats of each node. The driver's node has none; the two trainer ranks must be on different nodes, and so must the two
rollout workers."""
POOLS = (f"total_steps={STEPS}", "trainer.num_workers=2", "rollout.num_workers=2", "reward.num_workers=2")


@pytest.fixture(scope="module")
def nodes(allowed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with Nodes(tmp_path_factory.mktemp("nodes"), SEATS) as made:
        made.start_ray()
        yield made


@pytest.mark.parametrize("transport", ["object_store", "gloo"])
def test_the_weights_are_those_of_a_run_on_one_node(
    transport: str, nodes: Nodes, one_node_digest: Callable[[int], str]
) -> None:
    """The nodes' names mean loopback, and their default route leads nowhere: no connection may use these addresses."""
    per_node = ("trainer.workers_per_node=1", "rollout.workers_per_node=1")
    run = start(nodes.head, nodes.folder / transport, *POOLS, *per_node, f"checkpoint_engine.transport={transport}")
    run.after_step(1)
    ends = [node.run("ss", "-Htna") for node in nodes.nodes]
    printed = run.finish()
    assert not [line for text in ends for line in text.splitlines() if OUTWARD in line or "127.0.1.1" in line]
    assert run.digest == one_node_digest(STEPS)
    second, third, fourth = (node.address for node in nodes.nodes[1:])
    assert run.nodes_of("trainer") == {second, third} and run.nodes_of("rollout") == {second, fourth}
    assert "nodes" in printed and all(f"{address}: " in printed for address in (second, third, fourth))


def test_a_run_with_another_token_than_the_cluster_is_told_what_to_do(nodes: Nodes) -> None:
    printed = start(nodes.head, nodes.folder / "token", *POOLS, RAY_AUTH_TOKEN="1" * 64).finish(2)
    assert "asks for its token, and this process has none or another one" in printed.splitlines()[-1]
