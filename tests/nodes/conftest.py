"""Fixtures of the tests on pretended nodes; the tests are skipped, with a reason, where namespaces are not allowed."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import WHOLE, train
from tests.nodes.pretended_nodes import Nodes, obstacle


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
            folder = tmp_path_factory.mktemp("one_node")
            known[steps] = train(folder, "one_step_off", *WHOLE, f"total_steps={steps}").digest
        return known[steps]

    return digest
