"""Which process runs a test: with `-n`, as `make test` has it, a file stays in one, and so do all serial tests."""

import pytest


def group_of(request: pytest.FixtureRequest) -> str:
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("all tests are in this process: pytest was started without -n and --dist loadgroup")
    node: pytest.Item = request.node
    return node.nodeid.rpartition("@")[2]


@pytest.mark.parametrize("name", ["a", "b@c"])
def test_the_scheduler_is_told_the_file(name: str, request: pytest.FixtureRequest) -> None:
    assert group_of(request) == "tests/unit/test_test_groups.py"
