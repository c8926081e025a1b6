"""Fixtures of the tests in this folder."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def ranks_meet() -> Iterator[None]:
    """Toy trainer ranks need no process group to add up what each has computed."""
    from tests.support.toy_recovery import toy_ranks_meet

    with toy_ranks_meet():
        yield
