"""Fixtures of the integration tests, which run the real engine on the tiny model without network."""

import logging
import os
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import pytest
import torch

from separation.processes import descendants, kill
from tests.integration import gates
from tests.integration.runs import DELAYS, GLOO, RECORDED, TRAINED, check_overtaken
from tests.integration.seated import JUDGE, LATER
from tests.integration.stopped import StoppedRun, stopped_on_ray
from tests.integration.watched import WatchedRun, watched_on_ray

ON_TOY_POOLS = ("test_separation_processes.py", "test_separation_ray.py")
"""Files whose tests share the pools of separation_bench.py."""


@pytest.fixture(autouse=True)
def single_threaded_and_quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One torch thread, nobody else's cluster, and the root logger as it was: a run configures it for its own log."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    root, threads = logging.getLogger(), torch.get_num_threads()
    handlers, level = list(root.handlers), root.level
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
        handler.close()
    for handler in set(handlers) - set(root.handlers):
        root.addHandler(handler)
    root.setLevel(level)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Closes what is on Ray after the last test that shares it: other tests start clusters of their own."""
    if _here and (nextitem is None or "ray_here" not in getattr(nextitem, "fixturenames", ())):
        import ray

        _here.clear()
        ray.shutdown()
    if item.path.name in ON_TOY_POOLS and (nextitem is None or nextitem.path.name not in ON_TOY_POOLS):
        from tests.integration.separation_bench import close_on_ray  # It imports Ray.

        close_on_ray()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test of the toy pools is a coroutine on their event loop."""
    bench: Any = pyfuncitem.funcargs.get("bench")
    if bench is None:
        return None
    bench.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in signature(pyfuncitem.obj).parameters}))
    return True


def started(cluster: Callable[[], Any]) -> Any:
    """A Ray cluster, once it is up.

    It is tried again because Ray gives up a daemon that has not registered within 30 seconds, a constant inside
    `ray._private.node.Node` that no setting changes, and a busy machine may take longer. No test is tried again.
    """
    before = set(descendants(os.getpid()))
    for _ in range(4):
        try:
            return cluster()
        except Exception as error:  # Ray raises nothing narrower
            if "timed out during startup" not in str(error):
                raise
            for process in set(descendants(os.getpid())) - before:
                kill(process)
    return cluster()


@pytest.fixture(scope="module")
def trained() -> Any:
    """A tiny Qwen-Image whose adapter changes its output, as after training."""
    from tests.integration.exported import LORA
    from tests.support.tiny import adapted_policy

    return adapted_policy(config=LORA)


@pytest.fixture(scope="session")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> WatchedRun:
    """As people start it, a process on a Ray cluster of its own: two trainer ranks that send by gloo, two rollout
    workers, delays, all that can be recorded. Only its controller takes the first ticket of each step last (gates.py).

    It is the one run for all tests that look at such a run. What uses it is marked serial, so that one process has it.
    """
    settings = (*TRAINED, *RECORDED, *DELAYS, "rollout.num_workers=2", "trainer.num_workers=2", *GLOO)
    folder = tmp_path_factory.mktemp("full") / "one_step_off"
    run = watched_on_ray(folder, "one_step_off", *settings, program=gates.__name__)
    check_overtaken(run)
    return run


@pytest.fixture(scope="session")
def stopped_run(tmp_path_factory: pytest.TempPathFactory) -> StoppedRun:
    """A run of two processes on Ray that sample and train, ended by SIGTERM: for the tests of either."""
    return stopped_on_ray(tmp_path_factory.mktemp("stopped") / "run")


_here: list[bool] = []
"""Not empty while the cluster of `ray_here` is up."""


@pytest.fixture(scope="module")
def ray_here() -> None:
    """This process connected to a Ray cluster without GPUs, with room for two trainer ranks, two rollout workers, two
    judges and one held-out term.

    It is the same for tests that use it one after another, in several files; `pytest_runtest_teardown` ends it. A file
    that finds it dead, or seats taken by what a failed test left, begins with a new one.
    """
    from tests.support.ray_cluster import all_free, start_ray

    if _here and not all_free():
        import ray

        ray.shutdown()
        _here.clear()
    if not _here:
        room = {"trainer": 2, "rollout": 2, JUDGE: 2, LATER: 1}
        started(lambda: start_ray(num_gpus=0, resources=room))
        _here.append(True)
