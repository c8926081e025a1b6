"""Fixtures of every model family: a new family is one more parameter."""

from typing import Any

import pytest

from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.types import ConditionImage
from tests.support.families import NAMES, adapted, to_edit
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


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[ConditionImage]:
    """Two images to edit, of different aspect ratios."""
    return to_edit(tmp_path_factory.mktemp("images"), (200, 300), (256, 128))
