"""A policy with an adapter and its engine, which the tests of a file share."""

import pytest

from async_flowrl.policies.qwen_image import QwenImagePolicy
from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from tests.support.tiny import adapted_policy


@pytest.fixture(scope="module")
def policy() -> QwenImagePolicy:
    return adapted_policy()


@pytest.fixture(scope="module")
def engine(policy: QwenImagePolicy) -> DiffusersEngine:
    return DiffusersEngine(policy)
