"""Fixtures of every model family: a new family is one more parameter."""

from typing import Any

import pytest

from async_flowrl.policies.pipeline import PipelinePolicy
from tests.support.families import NAMES, adapted
from tests.support.shared_models import SharedModels


@pytest.fixture(scope="module", params=NAMES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def policy(family: str) -> PipelinePolicy:
    return adapted(family)


@pytest.fixture(scope="module")
def plain(family: str, shared_models: SharedModels) -> PipelinePolicy:
    """The policy without an adapter."""
    return shared_models.policy(family)


@pytest.fixture(scope="module")
def pipeline(family: str, shared_models: SharedModels) -> Any:
    """diffusers' pipeline, without an adapter."""
    return shared_models.pipeline(family)
