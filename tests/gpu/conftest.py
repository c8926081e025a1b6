"""The transports over NCCL, each of which a test is run with."""

import os

import pytest

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch reads it once, at the first product of any test


@pytest.fixture(params=["nccl", "pynccl"])
def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "pynccl":
        pytest.importorskip("cupy")
    return str(request.param)
