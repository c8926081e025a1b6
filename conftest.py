"""What every test finds, wherever the tests are started. Not in tests/, which would then be on the import path."""

import os
import signal
from collections.abc import Iterator
from typing import Any

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
"""Tests that start clusters, or that time the CPU: side by side they would slow each other."""
CLUSTERS = {"ray_here", "existing_cluster", "full_run"}
"""Fixtures that start one: whoever uses them needs no mark."""
LONG = (
    "tests/unit/training/test_trainer_ranks.py",
    "tests/unit/training/test_trainer_base_weights.py",
    "tests/unit/plan/test_rehearsal.py",
    "tests/unit/checkpoint_engine/test_engine_processes.py",
    "tests/integration/",
    "tests/chaos/",
)
"""What takes longest, so that no core is left alone with it at the end."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several test processes (`-n`), a file stays in one, and all files with a serial test stay in the same.

    These come first, then what takes long. What `-m` left out is gone by now.
    """
    paths = {item: item.path.relative_to(item.config.rootpath).as_posix() for item in items}
    serial = {paths[item] for item in items if item.get_closest_marker("serial") or CLUSTERS & _fixtures(item)}
    for item in items:
        if getattr(item.config.option, "loadgroup", False):
            _group(item, SERIAL if paths[item] in serial else paths[item])

    def turn(item: pytest.Item) -> int:
        if paths[item] in serial:
            return -1
        return next((number for number, start in enumerate(LONG) if paths[item].startswith(start)), len(LONG))

    items.sort(key=turn)


def _group(item: pytest.Item, group: str) -> None:
    """Writes the group behind the test's id, where xdist's scheduler reads it.

    The mark `xdist_group` is not enough: xdist asks for it before `-m` is applied, and 3.8 writes the group to what
    pytest 9.2 does not make the id of any more, so that every test would be a group of its own.
    """
    grouped: Any = f"{item.nodeid}@{group}"
    if (known := getattr(item, "_id", None)) is None:
        item._nodeid = grouped
    else:
        item._id = type(known).parse(grouped)  # type: ignore[attr-defined]


def _fixtures(item: pytest.Item) -> set[str]:
    return set(getattr(item, "fixturenames", ()))
