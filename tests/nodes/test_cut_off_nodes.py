"""Test of a node that is cut off from the others: it counts as dead, its processes end, and it stays out of the run."""

import time
from collections.abc import Callable, Mapping

import pytest

from tests.nodes.node_runs import start
from tests.nodes.pretended_nodes import Node, Nodes

pytestmark = [pytest.mark.nodes, pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(1800)]

STEPS = 20
LIMIT = 900.0
UNHURRIED = ("disturb.generate=10", "disturb.constant=true")
"""A pause of ten seconds before each ticket, so that the run is still going on when the cable is connected again."""
POOLS = ("trainer.num_workers=2", "rollout.num_workers=2", "save.every=2")
PINGS = {"RAY_grpc_client_keepalive_time_ms": "5000", "RAY_grpc_client_keepalive_timeout_ms": "5000"}
"""Settings of docs/clusters.md with shorter times: a raylet asks a silent head for a sign of life, and ends if it gets
none."""


def of_ray(node: Node) -> list[str]:
    """Returns the names of Ray's processes on a node, workers included."""
    return [process.name() for name in ("raylet", "ray::") for process in node.processes(name)]


@pytest.mark.parametrize(
    ("settings", "seconds", "raylet_ends"),
    [
        pytest.param(PINGS, 120.0, True, id="two minutes, and the whole side has ended by itself"),
        pytest.param({}, 60.0, False, id="one minute, and a raylet that has not noticed is turned away"),
    ],
)
def test_a_node_that_comes_back_finds_the_run_gone_on_without_it(
    settings: Mapping[str, str],
    seconds: float,
    raylet_ends: bool,
    ray_nodes: Callable[..., Nodes],
    one_node_digest: Callable[[int], str],
) -> None:
    """The node had a trainer rank and a rollout worker. There are three nodes with a seat for each, for two pairs."""
    both = {"trainer": 1, "rollout": 1}
    nodes = ray_nodes({}, both, both, both, environment=settings)
    run = start(nodes.head, nodes.folder / "run", f"total_steps={STEPS}", *POOLS, *UNHURRIED)
    run.after_step(1, LIMIT)
    both_pools = run.nodes_of("trainer") & run.nodes_of("rollout")
    cut = next(node for node in nodes.nodes if node.address in both_pools)
    workers = [event["worker"] for event in run.events if event["event"] == "worker" and event["node"] == cut.address]
    cut.unplug()
    began, unplugged = time.time(), time.monotonic()
    run.wait_for(lambda: not cut.processes("ray::ProcessHost"), "the end of the workers that were cut off", seconds)
    logs = {worker: run.root / "logs" / f"{worker}.log" for worker in workers}
    assert all("this worker ends itself" in log.read_text() for log in logs.values())
    written = {worker: log.stat().st_mtime for worker, log in logs.items()}
    if raylet_ends:
        run.wait_for(lambda: not of_ray(cut), "the end of the raylet that was cut off", seconds)
    time.sleep(max(0.0, unplugged + seconds - time.monotonic()))
    assert bool(cut.processes("raylet")) != raylet_ends
    assert run.process.poll() is None, "the run is over before the cable is put back"
    cut.plug()
    run.wait_for(lambda: not of_ray(cut), "the end of a raylet that the head has given up", LIMIT)
    run.finish(seconds=LIMIT)
    assert run.digest == one_node_digest(STEPS)
    assert len(run.trained) == len(set(run.trained))
    faults = [event for event in run.events if event["event"] == "fault" and event["worker"] in workers]
    assert {"trainer", "rollout"} <= {event["worker"].partition("-")[0] for event in faults}
    later = [event for event in run.events if event["event"] == "worker" and event["time"] > began]
    assert later and {e["worker"] for e in later if e["node"] == cut.address} <= set(workers), "nothing of it joins"
    given_up = max(event["time"] for event in faults)
    spans = [e["time"] for e in run.events if e["event"] == "span" and e["worker"] in workers]
    assert max(spans) < given_up, "nothing of it contributes"
    assert {worker: log.stat().st_mtime for worker, log in logs.items()} == written, "it writes nothing any more"
