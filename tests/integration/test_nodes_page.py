"""Tests that run the commands of docs/do/nodes.md in order, each on the pretended node that its mark names."""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from async_flowrl.main import main
from tests.nodes import pretended_nodes
from tests.nodes.pretended_nodes import Node, Nodes
from tests.support.published import use_published_models

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "do" / "nodes.md"
BLOCK = re.compile(r"^(?:<!-- ([a-z]+)(?: (\d))? -->\n)?```(bash|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SECONDS = 1800.0
"""Of one block."""
SEATS = {"RAY_OVERRIDE_RESOURCES": '{"CPU": 2}'}
"""Each node has seats for two workers, however many cores this machine has: the last node's are missing before."""
ATTEMPTS = 3


@dataclass(frozen=True)
class Block:
    """`mark`: `node`, with its number, or `gpu`; empty where the page forgot it."""

    mark: str
    node: int
    kind: str
    text: str


def blocks() -> list[Block]:
    found = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    return [Block(mark, int(node or 0), kind, text) for mark, node, kind, text in found]


def test_every_block_says_where_it_runs() -> None:
    assert {block.mark for block in blocks()} == {"node", "gpu"}
    assert {block.node for block in blocks() if block.mark == "node"} == {1, 2, 3}


@pytest.mark.extended
def test_the_command_for_64_gpus_composes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the model's own configuration; what looks at the cluster is left out."""
    (block,) = [block for block in blocks() if block.mark == "gpu"]
    _, verb, *words = shlex.split(block.text.replace("\\\n", " "))
    assert verb == "train"
    counts = dict(word.split("=") for word in words if ".num_workers=" in word)
    assert int(counts["trainer.num_workers"]) + int(counts["rollout.num_workers"]) == 64
    use_published_models(tmp_path / "hub", monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["async_flowrl.main", *words, "dry_run=true"])
    assert main() == 0


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(6000)
def test_the_page_runs_on_three_nodes(tmp_path: Path) -> None:
    if (obstacle := pretended_nodes.obstacle()) is not None:
        pytest.skip(obstacle)
    shared = tmp_path / "shared"
    shared.mkdir()
    with Nodes(tmp_path / "nodes", [{}, {}, {}]) as nodes:
        nodes.head.run(pretended_nodes.RAY_COMMAND, "get-auth-token", "--generate", HOME=str(tmp_path))
        for block in blocks():
            if block.mark == "node":
                carry_out(block, nodes.nodes, shared)
    log = (shared / "run.log").read_text()
    assert f" on {nodes.nodes[2].address} joined: " in log
    assert f" on {nodes.nodes[2].address} left (its node is drained): " in log
    assert (shared / "runs" / "nodes" / "report.html").exists()


def carry_out(block: Block, nodes: list[Node], shared: Path) -> None:
    """One block. Ray gives a raylet 30 s to announce itself; a busy machine has a second and a third try."""
    for left in reversed(range(ATTEMPTS)):
        code, said = executed(block, nodes, shared)
        if code == 0:
            return
        assert left and "timed out during startup" in said, (
            f"on node {block.node}, code {code}:\n{block.text}\n{said}\n{logged(shared)}"
        )
        nodes[block.node - 1].run(str(Path(sys.executable).with_name("ray")), "stop", "--force", seconds=SECONDS)


def executed(block: Block, nodes: list[Node], shared: Path) -> tuple[int, str]:
    """By a shell of its own, in the folder that all nodes see. What it leaves in the background goes on."""
    node, output = nodes[block.node - 1], shared / "output.txt"
    text = block.text if block.kind == "bash" else f"{sys.executable} -c {shlex.quote(block.text)}"
    with output.open("w") as stream:
        process = node.start(
            "bash",
            "-euo",
            "pipefail",
            "-c",
            f"cd {shlex.quote(str(shared))}\n{text}",
            stdout=stream,
            PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            PYTHONPATH=str(ROOT),
            RAY_AUTH_MODE="token",
            FIRST_NODE=nodes[0].address,
            THIRD_NODE=nodes[2].address,
            THIS_NODE=node.address,
            **(SEATS if text.startswith("ray start") else {}),
        )
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            code = -1
    return code, output.read_text()


def logged(shared: Path) -> str:
    log = shared / "run.log"
    return log.read_text()[-4000:] if log.exists() else ""
