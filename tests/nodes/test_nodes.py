"""Tests of runs over several nodes: the weights are those of a run on one node, and wrong set-ups are refused early."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.nodes.node_runs import start
from tests.nodes.pretended_nodes import OUTWARD, ROOT, Node, Nodes

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


def refused(nodes: Nodes, name: str, *overrides: str) -> str:
    """Starts a run that must be refused and returns its output; checks that it has not trained."""
    printed = start(nodes.head, nodes.folder / name, *POOLS, *overrides).finish(2)
    assert not (nodes.folder / name / "metrics.jsonl").exists()
    return printed


def links() -> str:
    """Returns the network interfaces of this machine outside the nodes, as text."""
    return subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout


def shown_by(node: Node, source: Path, target: Path) -> None:
    """Makes the file or folder `source` appear at the path of `target` on this node only."""
    node.run("mount", "--bind", str(source), str(target))


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


def test_more_workers_per_node_than_nodes_hold_are_refused_with_the_table_of_seats(nodes: Nodes) -> None:
    printed = refused(nodes, "full", "rollout.workers_per_node=2")
    assert "no node has 2 CPU, 2 rollout together" in printed
    table = printed[printed.index("node ") :]
    assert all(node.address in table for node in nodes.nodes) and "nowhere" in table and "trainer-0" in table


def test_a_run_with_another_token_than_the_cluster_is_told_what_to_do(nodes: Nodes) -> None:
    printed = start(nodes.head, nodes.folder / "token", *POOLS, RAY_AUTH_TOKEN="1" * 64).finish(2)
    assert "asks for its token, and this process has none or another one" in printed.splitlines()[-1]


def test_another_version_on_a_node_is_refused_by_name(nodes: Nodes) -> None:
    changed, target = nodes.folder / "seeds.py", ROOT / "async_flowrl" / "seeds.py"
    changed.write_text(target.read_text() + "# another version\n")
    other = nodes.nodes[3]
    shown_by(other, changed, target)
    try:
        printed = refused(nodes, "versions")
    finally:
        other.run("umount", str(target))
    assert f"node {other.address} has another version of async_flowrl" in printed


def test_a_run_directory_that_a_trainer_node_does_not_see_is_refused(nodes: Nodes) -> None:
    empty, runs = nodes.folder / "empty", nodes.folder / "unshared"
    empty.mkdir()
    runs.mkdir()
    blind = nodes.nodes[2]
    shown_by(blind, empty, runs)
    printed = refused(nodes, "unshared/run")
    assert "is not shared: trainer-" in printed and f"on node {blind.address} does not see" in printed


def test_nodes_end_with_the_process_that_made_them(allowed: None, tmp_path: Path) -> None:
    """This holds even if that process gets SIGKILL: no process, cable or mount is left."""
    program = (
        "import sys, time; from pathlib import Path; from tests.nodes.pretended_nodes import Nodes\n"
        "nodes = Nodes(Path(sys.argv[1]), [{}, {}]).__enter__()\n"
        "print(*(n.spaces.pid for n in nodes.nodes), flush=True); time.sleep(60)"
    )
    before = links()
    maker = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert maker.stdout is not None
    pids = [int(pid) for pid in maker.stdout.readline().split()]
    assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
    maker.kill()
    maker.wait()
    maker.stdout.close()
    end = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < end, "a node outlives the process that made it"
        time.sleep(0.05)
    assert links() == before and "scratch /tmp/ray" not in Path("/proc/mounts").read_text()
