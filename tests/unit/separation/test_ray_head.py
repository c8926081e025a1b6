"""Tests of starting Ray without services that no run uses, and of starting it whole if that is impossible."""

import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import ray
from ray._private.node import Node

from separation import ray_connection
from separation.placement import ResourcesMissing
from separation.ray_head import LAST, UNUSED, start_with_what_runs
from tests.support.ray_node import FakeNode


def called(node: object, names: list[str]) -> None:
    """What a head node calls, by these names."""
    for name in names:
        getattr(Node, name)(node)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[FakeNode]:
    with closing(FakeNode(tmp_path)) as node:
        yield node


def test_inside_nothing_of_it_is_started_and_afterwards_ray_is_as_before(node: FakeNode) -> None:
    before = [getattr(Node, name) for name in UNUSED]
    start_with_what_runs(lambda: called(node, list(UNUSED)))
    assert node._webui_url == ""
    assert [getattr(Node, name) for name in UNUSED] == before


def test_a_thread_begins_when_the_last_daemon_has_been_launched(
    monkeypatch: pytest.MonkeyPatch, node: FakeNode
) -> None:
    order: list[str] = []
    monkeypatch.setattr(Node, LAST, lambda _: order.append(LAST))
    before = getattr(Node, LAST)
    meanwhile = threading.Thread(target=order.append, args=["launched"])
    start_with_what_runs(lambda: called(node, [*UNUSED, LAST]), meanwhile)
    meanwhile.join()
    assert order == [LAST, "launched"]
    assert getattr(Node, LAST) is before


def test_a_ray_that_is_started_again_whole_forks_beside_no_thread(
    monkeypatch: pytest.MonkeyPatch, node: FakeNode
) -> None:
    alive: list[bool] = []
    monkeypatch.setattr(Node, LAST, lambda node, *_: None)
    meanwhile = threading.Thread(target=time.sleep, args=[0.3])

    def start() -> None:
        alive.append(meanwhile.is_alive())
        if len(alive) == 1:
            called(node, [LAST])
            raise KeyError("node_info")

    start_with_what_runs(start, meanwhile)
    assert alive == [False, False] and meanwhile.ident is not None


def test_a_ray_without_one_of_the_methods_is_started_whole_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    others = {name: getattr(Node, name) for name in UNUSED[1:]}
    monkeypatch.delattr(Node, UNUSED[0])
    starts = []
    with caplog.at_level(logging.WARNING):
        start_with_what_runs(lambda: starts.append({name: getattr(Node, name) for name in UNUSED[1:]}))
    assert starts == [others]
    assert "cannot be started without its autoscaler" in caplog.text
    assert UNUSED[0] in caplog.text


def test_a_ray_that_needs_what_they_leave_behind_is_started_whole_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    before = [getattr(Node, name) for name in UNUSED]
    starts = []

    def start() -> None:
        starts.append([getattr(Node, name) for name in UNUSED])
        if starts[-1] != before:
            raise KeyError("dashboard")

    with caplog.at_level(logging.WARNING):
        start_with_what_runs(start)
    assert starts[1:] == [before]
    assert "KeyError: 'dashboard'" in caplog.text


def test_what_is_wrong_with_the_machine_is_not_tried_twice() -> None:
    starts = []

    def start() -> None:
        starts.append(1)
        raise ConnectionError("no port is free")

    with pytest.raises(ConnectionError):
        start_with_what_runs(start)
    assert len(starts) == 1


def test_what_a_start_that_is_interrupted_has_started_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C comes in the middle of `ray.init`."""
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(*_: object, **__: object) -> None:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        raise KeyboardInterrupt

    monkeypatch.setattr(ray, "init", interrupted)
    monkeypatch.setattr(ray_connection, "GRACE_SECONDS", 0.1)
    with pytest.raises(KeyboardInterrupt):
        ray_connection.RayConnection([], None)
    assert started[0].wait(60) == -signal.SIGKILL


def test_an_existing_cluster_is_joined_as_ray_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    before = [getattr(Node, name) for name in UNUSED]

    def init(*arguments: object, **options: object) -> None:
        calls.append((arguments, sorted(options), [getattr(Node, name) for name in UNUSED] == before))

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # otherwise a head is asked that may have ended long ago
    ray_connection.RayConnection([], "auto")
    assert calls == [(("auto",), ["job_config", "log_to_driver", "logging_level"], True)]


def test_an_address_where_nothing_listens_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("Ray would try for minutes"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(ResourcesMissing, match=f"no Ray cluster answers at the address {address}"):
            ray_connection.RayConnection([], address)
