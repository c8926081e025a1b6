"""Test of a rollout pool that grows and shrinks over several nodes: the weights are those of a run on one node."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.nodes.node_runs import RunOnNodes, start
from tests.nodes.pretended_nodes import PORT, RAY_COMMAND, Node, Nodes

pytestmark = [pytest.mark.nodes, pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(1800)]

STEPS = 10
POOL = ("rollout.num_workers=1", "rollout.min_workers=1", "rollout.max_workers=2")
UNHURRIED = ("disturb.generate=10", "disturb.constant=true")
"""A pause of ten seconds before each ticket, so that the run is still going on when the new node has joined."""
LIMIT = 600.0
NOTICE = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot", "--deadline-remaining-seconds", "120")


def drain(node: Node, head: Node) -> None:
    """Tells the cluster that the node will end, as a preemption notice does."""
    (raylet,) = node.processes("raylet")
    (number,) = (word.partition("=")[2] for word in raylet.cmdline() if word.startswith("--node_id="))
    where = ("--address", f"{head.address}:{PORT}", "--node-id", number)
    head.run(RAY_COMMAND, "drain-node", *where, *NOTICE, seconds=LIMIT, RAY_AUTH_MODE="token")


def of(run: RunOnNodes, event: str, **match: Any) -> list[dict[str, Any]]:
    return [e for e in run.events if e["event"] == event and all(e.get(key) == value for key, value in match.items())]


def test_a_worker_joins_from_a_node_that_arrives_and_another_leaves_one_that_is_drained(
    ray_nodes: Callable[..., Nodes], one_node_digest: Callable[[int], str]
) -> None:
    nodes = ray_nodes({}, {"trainer": 1}, {"rollout": 1})
    run = start(nodes.head, nodes.folder / "run", f"total_steps={STEPS}", *POOL, *UNHURRIED)
    run.after_step(1, LIMIT)
    arrived, first = nodes.add({"rollout": 1}), nodes.nodes[2]
    arrived.start_ray(nodes.head)
    run.wait_for(lambda: of(run, "worker_joined"), "a worker of the node that has arrived", LIMIT)
    run.wait_for(lambda: of(run, "ticket", worker="rollout-1", state="SCORING"), "a ticket that it has made", LIMIT)
    drain(first, nodes.head)
    run.wait_for(lambda: of(run, "worker_left"), "the worker of the drained node to leave", LIMIT)
    printed = run.finish(seconds=LIMIT)
    (joined,), (left,) = of(run, "worker_joined"), of(run, "worker_left")
    assert (joined["worker"], joined["node"], joined["workers"]) == ("rollout-1", arrived.address, 2)
    assert (left["worker"], left["node"], left["workers"]) == ("rollout-0", first.address, 1)
    assert not of(run, "fault"), "leaving is not dying"
    given = [e["time"] for e in of(run, "ticket", worker="rollout-0", state="RUNNING")]
    assert max(given) < left["time"], "a worker that has left gets nothing"
    assert run.digest == one_node_digest(STEPS)
    assert len(run.trained) == len(set(run.trained))
    assert f"rollout-1 on {arrived.address} joined" in printed and f"rollout-0 on {first.address} left" in printed
    assert not first.processes("ray::ProcessHost"), "nothing of the run is left on the drained node"
