"""What every test finds, wherever the tests are started. Not in tests/, which would then be on the import path."""

import os
import signal
from collections.abc import Iterator

import pytest

# No test reaches for the model hub; what counts is the setting at the time when huggingface_hub is imported.
os.environ["HF_HUB_OFFLINE"] = "1"

# A shell that starts a command in the background has it ignore Ctrl-C, and whatever that command starts as well. The
# runs that tests interrupt have to hear it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The tests' networks and tensors are so small that torch's threads slow them down."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SERIAL = "one at a time"
"""Tests that start clusters or trees of processes, or that time the CPU: side by side they would slow each other."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several test processes (`-n`), a file stays in one, and all files of tests/integration stay in the same."""
    for item in items:
        path = item.path.relative_to(item.config.rootpath).as_posix()
        serial = path.startswith("tests/integration/") or item.get_closest_marker("serial") is not None
        item.add_marker(pytest.mark.xdist_group(SERIAL if serial else path))
