"""Tests of faults of whole nodes; each test's name says the outcome.

"The same weights" are those of a run on one node.
"""

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.nodes.node_processes import end_tree
from tests.nodes.node_runs import HEADLESS, RunOnNodes, start
from tests.nodes.pretended_nodes import Nodes

pytestmark = [pytest.mark.nodes, pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(900)]

STEPS = 10
FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"
LATE = {"LD_PRELOAD": FAKETIME, "FAKETIME": "-300s"}
FILL = """import time, numpy, ray
ray.init(address="auto", log_to_driver=False)
kept = [ray.put(numpy.full(20_000_000, index, numpy.uint8)) for index in range(8)]
print("full", flush=True)
time.sleep(3600)
"""
"""Program that puts 160 MB into an object store of 100 MB; Ray moves the rest to disk."""
IN_THE_STORE = {"RAY_max_direct_call_object_size": "1000"}
"""Setting of Ray by which results of more than 1 KB stay in the store of their worker's node, as those of a large model
do. By default Ray sends results below 100 KB with the answer, and those of the small model are that small."""
POOLS = (f"total_steps={STEPS}", "trainer.num_workers=2", "rollout.num_workers=2", "save.every=2")
Make = Callable[..., Nodes]
Digest = Callable[[int], str]


def begun(nodes: Nodes, *overrides: str) -> RunOnNodes:
    run = start(nodes.head, nodes.folder / "run", *POOLS, *overrides)
    run.after_step(3)
    return run


def same_weights(run: RunOnNodes, digest: Digest) -> None:
    """Checks that the run ends well, has the weights of a run on one node, and has trained no ticket twice."""
    run.finish()
    assert run.digest == digest(STEPS)
    assert len(run.trained) == len(set(run.trained))


def node_with(nodes: Nodes, run: RunOnNodes, pool: str) -> int:
    """Returns the index of the last node that has had a worker of the pool."""
    addresses = run.nodes_of(pool)
    return max(index for index, node in enumerate(nodes.nodes) if node.address in addresses)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_without_the_raylet_of_a_rollout_worker_the_weights_are_the_same(
    how: signal.Signals, ray_nodes: Make, one_node_digest: Digest
) -> None:
    """SIGTERM ends a raylet in order, but its workers die then, too."""
    nodes = ray_nodes({}, {"trainer": 2}, {"rollout": 1}, {"rollout": 1}, {"rollout": 1})
    run = begun(nodes)
    nodes.nodes[node_with(nodes, run, "rollout")].kill("raylet", how)
    same_weights(run, one_node_digest)
    assert {event["kind"] for event in run.events if event["event"] == "fault"} >= {"WorkerDied"}


def test_trajectories_whose_only_copy_was_on_a_lost_node_are_made_again(
    ray_nodes: Make, one_node_digest: Digest
) -> None:
    """The trajectories wait for the trainer, which pauses inside a step, when the raylet of their node is killed."""
    steps = 5
    nodes = ray_nodes({}, {"trainer": 1}, {"rollout": 1}, {"rollout": 1}, environment=IN_THE_STORE)
    slow_trainer = ("disturb.update=40", "disturb.constant=true")
    run = start(nodes.head, nodes.folder / "run", f"total_steps={steps}", *slow_trainer)
    run.after_step(2)
    time.sleep(20)  # Half of the trainer's pause; the tickets of the next step are made meanwhile.
    lost = nodes.nodes[node_with(nodes, run, "rollout")]
    lost.kill("raylet")
    killed = time.time()
    run.finish(seconds=600)
    assert run.digest == one_node_digest(steps)
    assert len(run.trained) == len(set(run.trained)) == 2 * steps
    tickets = [event for event in run.events if event["event"] == "ticket" and event["kind"] == "train"]
    ready = {event["ordinal"] for event in tickets if event["state"] == "READY" and event["time"] < killed}
    again = {event["ordinal"] for event in tickets if event["state"] == "RUNNING" and event["time"] > killed}
    assert ready & again, "what was ready is made again"
    assert [event for event in run.events if event["event"] == "fault" and event["kind"] == "RefLost"]
    assert not [event for event in run.events if event["event"] == "rollback"], "the trainer lost nothing"


def test_without_the_raylet_of_a_trainer_rank_the_weights_are_the_same(
    ray_nodes: Make, one_node_digest: Digest
) -> None:
    nodes = ray_nodes({}, {"rollout": 2}, {"trainer": 1}, {"trainer": 1}, {"trainer": 1})
    run = begun(nodes)
    nodes.nodes[node_with(nodes, run, "trainer")].kill("raylet")
    same_weights(run, one_node_digest)
    assert "the other trainer ranks compute its share of this step" in run.log
    assert not [event for event in run.events if event["event"] == "rollback"]


def test_five_seconds_without_a_cable_change_nothing(ray_nodes: Make, one_node_digest: Digest) -> None:
    nodes = ray_nodes({}, {"trainer": 1, "rollout": 1}, {"trainer": 1, "rollout": 1})
    run = begun(nodes)
    nodes.nodes[2].unplug()
    time.sleep(5)
    nodes.nodes[2].plug()
    same_weights(run, one_node_digest)
    assert not [event for event in run.events if event["event"] == "fault"]


def test_a_disk_that_fills_changes_nothing_and_a_full_one_is_named(ray_nodes: Make, one_node_digest: Digest) -> None:
    nodes = ray_nodes({}, {"trainer": 2}, {"rollout": 2})
    run = begun(nodes)
    fill = "dd if=/dev/zero of=/tmp/ray/full bs=1M 2>/dev/null; df --output=avail /tmp/ray | tail -1"
    assert nodes.nodes[2].run("sh", "-c", fill).strip() == "0"
    same_weights(run, one_node_digest)
    printed = start(nodes.head, nodes.folder / "second", *POOLS).finish(1)
    assert "rollout-" in printed.splitlines()[-1] and "whether that disk is full" in printed.splitlines()[-1]


def test_a_full_object_store_on_a_node_changes_nothing(ray_nodes: Make, one_node_digest: Digest) -> None:
    nodes = ray_nodes({}, {"trainer": 2}, {"rollout": 2})
    others = nodes.nodes[2].start(sys.executable, "-c", FILL)
    assert others.stdout is not None
    assert "full\n" in iter(others.stdout.readline, "")
    same_weights(begun(nodes), one_node_digest)
    assert others.poll() is None
    end_tree(others)


def test_a_clock_five_minutes_behind_changes_nothing(allowed: None, tmp_path: Path, one_node_digest: Digest) -> None:
    if not Path(FAKETIME).exists():
        pytest.skip("no libfaketime: apt-get install faketime")
    with Nodes(tmp_path / "nodes", [{}, {"trainer": 2}]) as nodes:
        nodes.add({"rollout": 2}, environment=LATE)
        nodes.start_ray()
        late, now = (float(node.run("date", "+%s")) for node in (nodes.nodes[2], nodes.head))
        assert now - late > 200
        same_weights(begun(nodes), one_node_digest)


def test_without_the_head_the_run_ends_with_a_sentence(ray_nodes: Make) -> None:
    nodes = ray_nodes({}, {}, {"trainer": 2}, {"rollout": 2})
    run = start(nodes.nodes[1], nodes.folder / "run", *POOLS, "total_steps=200")
    run.after_step(3)
    nodes.head.power_off()
    printed = run.finish(1, seconds=HEADLESS)
    # On a busy machine Ray's own line about the lost head comes after it.
    (said,) = (line for line in printed.splitlines() if line.startswith("async_flowrl: the run failed: "))
    assert "HeadLost: Ray's head node" in said
