"""Fixtures of the tests on pretended nodes; the tests are skipped, with a reason, where namespaces are not allowed."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.nodes.node_runs import TINY
from tests.nodes.pretended_nodes import ROOT, Nodes, obstacle


@pytest.fixture(scope="session")
def allowed() -> None:
    if sentence := obstacle():
        pytest.skip(sentence)


@pytest.fixture
def ray_nodes(allowed: None, tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    """Returns a function that makes nodes with a Ray cluster, one node per mapping of seats; the first is the head.

    Keyword arguments are fields of every node. The nodes end with the test.
    """
    opened: list[Nodes] = []

    def make(*seats: Mapping[str, float], **each: Any) -> Nodes:
        nodes = Nodes(tmp_path / "nodes", seats, **each)
        opened.append(nodes)
        nodes.__enter__()
        nodes.start_ray()
        return nodes

    try:
        yield make
    finally:
        for nodes in opened:
            nodes.close()


@pytest.fixture(scope="session")
def one_node_digest(allowed: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """Returns a function: number of steps → digest of the weights of a run whose workers are threads of one process."""
    known: dict[int, str] = {}

    def digest(steps: int) -> str:
        if steps not in known:
            root = tmp_path_factory.mktemp("one_node") / "run"
            words = [*TINY, "runtime.backend=local", f"total_steps={steps}", f"output_dir={root}"]
            command = [sys.executable, "-m", "benchmarks.disturbed", "--config-name", "one_step_off", *words]
            environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
            subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=300)
            known[steps] = str(json.loads((root / "summary.json").read_text())["weights_digest"])
        return known[steps]

    return digest
