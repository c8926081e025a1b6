"""The transports over NCCL, each of which a test is run with."""

import pytest


@pytest.fixture(params=["nccl", "pynccl"])
def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "pynccl":
        pytest.importorskip("cupy")
    return str(request.param)
