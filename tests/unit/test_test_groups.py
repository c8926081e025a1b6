"""Tests of conftest.py: with `-n`, the tests of a lane run in one process, and so do the other tests of a file."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

import conftest


def group_of(request: pytest.FixtureRequest) -> str:
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("all tests are in this process: pytest was started without -n and --dist loadgroup")
    node: pytest.Item = request.node
    return node.nodeid.rpartition("@")[2]


@pytest.mark.parametrize("name", ["a", "b@c"])
def test_the_scheduler_is_told_the_file(name: str, request: pytest.FixtureRequest) -> None:
    assert group_of(request) == "tests/unit/test_test_groups.py"


@pytest.mark.serial
def test_the_scheduler_is_told_the_lane(request: pytest.FixtureRequest) -> None:
    assert group_of(request) == "clusters"


def lane(*fixtures: str, mark: pytest.Mark | None = None) -> str | None:
    item = SimpleNamespace(nodeid="test_a", fixturenames=fixtures, get_closest_marker=lambda name: mark)
    return conftest._lane(cast("Any", item))


def serial(*names: str) -> pytest.Mark:
    return cast("pytest.Mark", SimpleNamespace(args=names))


def test_a_lane_is_that_of_the_mark_or_of_the_cluster() -> None:
    assert lane("tmp_path") is None
    assert lane(mark=serial()) == lane("existing_cluster") == "clusters"
    assert lane(mark=serial("runs")) == lane("ray_here") == lane("full_run", mark=serial()) == "runs"


def test_no_test_is_in_two_lanes_or_in_one_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="in one lane of runs, ranks, clusters, got clusters, runs"):
        lane("ray_here", "existing_cluster")
    with pytest.raises(ValueError, match="got nowhere"):
        lane(mark=serial("nowhere"))
