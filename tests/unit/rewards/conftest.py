"""Fixtures of the rewards' tests: servers that more than one file asks."""

from collections.abc import Iterator

import pytest

from tests.support.reward_server import served
from tests.support.scripted_judge import ScriptedJudge, completion, scripted_judge
from tests.unit.rewards.brightness_server import LIMITS, brightness


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of the project's own reward server, whose reward is the brightness."""
    with served(brightness, LIMITS) as address:
        yield address


@pytest.fixture
def server() -> Iterator[ScriptedJudge]:
    """A judge that gives every image 7, until the test changes its behaviour."""
    with scripted_judge(lambda request: completion('{"score": 7}')) as judge:
        yield judge


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits before it asks a server again."""
    monkeypatch.setattr("async_flowrl.rewards.endpoint.BACKOFF_SECONDS", 0.001)
