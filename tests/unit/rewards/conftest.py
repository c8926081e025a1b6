"""Fixtures of the rewards' tests: servers that more than one file asks."""

from collections.abc import Iterator

import pytest

from async_flowrl.serve_rewards.scorer import Settings
from tests.support.reward_server import served
from tests.unit.rewards.brightness_server import LIMITS, brightness


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(brightness, Settings(limits=LIMITS)) as address:
        yield address
