"""One real engine for all tests of the lane: vllm-omni claims its process's torch.distributed world."""

from collections.abc import Iterator

import pytest

from tests.vllm_omni.rig import Rig


@pytest.fixture(scope="session")
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.engine.close()
