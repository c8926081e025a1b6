"""Setup of every test session, wherever it is started. Not in tests/, which would then be on the import path."""

import gc
import inspect
import json
import os
import shlex
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

FORKED_BY = "forked_by"
"""Key of what a test process is told by the one that hands out the tests."""

# No test reaches for the model hub; what counts is the setting at the time when huggingface_hub is imported.
os.environ["HF_HUB_OFFLINE"] = "1"

# A shell that starts a command in the background has it ignore Ctrl-C, and whatever that command starts as well. The
# runs that tests interrupt have to hear it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Has the test processes (`-n`) forked by a process that has imported torch and the tests, for seconds each."""
    from tests.support import forked

    os.environ[forked.ARGUMENTS] = json.dumps(config.args)
    for spec in specs:
        spec.python = shlex.join(forked.python(forked.TESTS))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells each test process (`-n`) which other process forks for it."""
    from tests.support import forked

    node.workerinput[FORKED_BY] = forked.share()


def pytest_configure(config: pytest.Config) -> None:
    if (address := getattr(config, "workerinput", {}).get(FORKED_BY)) is not None:
        from tests.support import forked

        forked.use(address)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collecting imports millions of objects that stay: Python's search for garbage is off meanwhile, and then leaves
    them out, at the end of the session too. What tests leave behind is small, and is searched for less often."""
    gc.set_threshold(50_000, 10, 10)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in virtual time."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    from tests.support.virtual import run_virtual

    run_virtual(
        pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters})
    )
    return True


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The tests' networks and tensors are so small that torch's threads slow them down."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def shared_models() -> Iterator[Any]:
    """Tiny models that tests only read (tests/support/shared_models.py); the session's end checks that none changed."""
    from tests.support.shared_models import SharedModels

    models = SharedModels()
    yield models
    models.check()


LANES = ("runs", "clusters")
"""Groups of tests that come one after the other in one process: both go side by side, and beside the rest.

They start clusters, fork ranks or time the CPU, and mostly wait. Those of `runs` fork from one process, which imports
torch and diffusers once (tests/support/forked.py). A test is put into a lane by the mark `serial`, without a name into
the last, or by a fixture of CLUSTERS.
"""
SHARED_CLUSTER = "ray_here"
"""Fixture of a cluster for the tests of several files, which come one after the other within their lane."""
CLUSTERS = {
    SHARED_CLUSTER: "runs",
    "full_run": "runs",
    "stopped_run": "runs",
    "rig": "runs",
}
"""Fixture that starts a cluster or an engine → the lane of the tests that use it, which need no mark."""
TOGETHER = "tests/unit/plan/"
"""Folder whose tests go to one process, in which torch remembers what each operation makes of fake tensors."""
LONG = (
    TOGETHER,
    "tests/unit/checkpoint_engine/test_engine_processes.py",
    "tests/integration/",
    "tests/chaos/",
)
"""What takes longest, so that no core is left alone with it at the end."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """With several test processes (`-n`), a lane stays in one of them, and so do the other tests of a file.

    The lanes come first, then what takes long. What `-m` left out is gone by then.
    """
    yield
    paths = {item: item.path.relative_to(item.config.rootpath).as_posix() for item in items}
    lanes = {item: _lane(item) for item in items}
    for item in items:
        if getattr(item.config.option, "loadgroup", False):
            _group(item, lanes[item] or (TOGETHER if paths[item].startswith(TOGETHER) else paths[item]))

    def turn(item: pytest.Item) -> tuple[int, bool]:
        if lane := lanes[item]:
            return LANES.index(lane) - len(LANES), SHARED_CLUSTER not in getattr(item, "fixturenames", ())
        return next((number for number, start in enumerate(LONG) if paths[item].startswith(start)), len(LONG)), False

    items.sort(key=turn)


def _lane(item: pytest.Item) -> str | None:
    """The lane of a test, or None. Raises ValueError for a lane that is not in LANES, or two of them."""
    mark = item.get_closest_marker("serial")
    found = {CLUSTERS[name] for name in CLUSTERS if name in getattr(item, "fixturenames", ())}
    if mark is not None and (mark.args or not found):
        found.add(mark.args[0] if mark.args else LANES[-1])
    if len(found) > 1 or not found <= set(LANES):
        raise ValueError(f"{item.nodeid} must be in one lane of {', '.join(LANES)}, got {', '.join(sorted(found))}")
    return found.pop() if found else None


def _group(item: pytest.Item, group: str) -> None:
    """Writes the group behind the test's id, where xdist's scheduler reads it.

    The mark `xdist_group` is not enough: xdist asks for it before `-m` is applied, and 3.8 writes the group to what
    pytest 9.2 does not make the id of any more, so that every test would be a group of its own.
    """
    known: Any = item._id  # type: ignore[attr-defined]
    item._id = type(known).parse(f"{item.nodeid}@{group}")  # type: ignore[attr-defined]
