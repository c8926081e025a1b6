"""Collection of the tests on pretended GPUs: only in a process that `make test-pretend-gpu` starts."""

import os

import pytest

if "PRETEND_CUDA_DEVICES" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything of this folder needs the device."""
    for item in items:
        if "tests/pretend_gpu/" in item.path.as_posix():
            item.add_marker("pretend_gpu")
