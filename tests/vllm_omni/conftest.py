"""Fixture of the one real engine of these tests; vllm-omni claims the torch.distributed world of its process."""

from collections.abc import Iterator

import pytest

from tests.vllm_omni.rig import Rig


@pytest.fixture(scope="session")
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.engine.close()
