"""Test of a survey of a cluster to which a node is just being added."""

from collections.abc import Iterator
from typing import Any

import pytest

from separation import cluster_probe, ray_internals


def test_a_node_that_joins_between_two_questions_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    def growing() -> Iterator[list[dict[str, Any]]]:
        names: list[str] = []
        for name in "abc":
            names.append(name)
            resources = {"CPU": 8.0}
            yield [{"NodeID": one, "NodeManagerAddress": one, "Resources": resources, "Alive": True} for one in names]

    answers = growing()
    monkeypatch.setattr(cluster_probe.ray, "nodes", lambda: next(answers))
    monkeypatch.setattr(ray_internals, "available_resources_per_node", lambda: {"a": {"CPU": 2.0}})
    assert [(node.id, node.free) for node in cluster_probe.living()] == [("a", {"CPU": 2.0})]
    assert [node.free for node in cluster_probe.living()] == [{"CPU": 2.0}, {"CPU": 8.0}]
