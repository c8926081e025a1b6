"""Tests of starting and joining a Ray cluster; `ray.init` is replaced by what it might do."""

import signal
import socket
import subprocess
import sys

import pytest
import ray

from separation import ray_cluster
from separation.resources import ResourcesMissing


def test_what_a_start_that_is_interrupted_has_started_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C comes in the middle of `ray.init`."""
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(*_: object, **__: object) -> None:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        raise KeyboardInterrupt

    monkeypatch.setattr(ray, "init", interrupted)
    monkeypatch.setattr(ray_cluster, "GRACE_SECONDS", 0.1)
    with pytest.raises(KeyboardInterrupt):
        ray_cluster.RayConnection([], None)
    assert started[0].wait(60) == -signal.SIGKILL


@pytest.mark.parametrize("slow", [1, 99])
def test_a_start_that_ray_gives_up_on_a_busy_machine_is_tried_again(slow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def init(*_: object, **__: object) -> None:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        if len(started) <= slow:
            raise Exception("The current node timed out during startup. This could happen because …")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray_cluster, "GRACE_SECONDS", 0.1)
    if slow > ray_cluster.STARTS:
        with pytest.raises(ResourcesMissing):
            ray_cluster.RayConnection([], None)
    else:
        (left,) = ray_cluster.RayConnection([], None).daemons
        assert left.pid == started[-1].pid
        left.kill()
    assert [process.wait(60) for process in started] == [-signal.SIGKILL] * min(slow + 1, ray_cluster.STARTS)


def test_an_existing_cluster_is_joined_as_ray_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def init(*arguments: object, **options: object) -> None:
        calls.append((arguments, sorted(options)))

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # otherwise a head is asked that may have ended long ago
    ray_cluster.RayConnection([], "auto")
    assert calls == [(("auto",), ["job_config", "log_to_driver", "logging_level"])]


@pytest.mark.parametrize("auto", [False, True])
def test_an_address_where_nothing_listens_is_refused_at_once(auto: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given as it is, or by RAY_ADDRESS."""
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray would try for minutes"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        if auto:
            monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ResourcesMissing, match=f"no Ray cluster answers at the address {address}"):
            ray_cluster.RayConnection([], "auto" if auto else address)
