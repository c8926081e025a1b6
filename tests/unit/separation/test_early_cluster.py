"""Tests of a cluster that is started before its run is prepared; `ray.init` is replaced by what it might do."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import ray
from ray._private.node import Node

from separation import ray_connection
from separation.early_cluster import EarlyCluster
from separation.processes import descendants, kill_new
from separation.ray_head import LAST
from tests.support.marked import left_after, marked_processes
from tests.support.ray_node import FakeNode


@pytest.fixture
def starting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[Callable[[], object]], list[subprocess.Popen[bytes]]]]:
    """Makes `ray.init` launch one daemon, and then do what the test gives; returns the daemons."""
    daemons: list[subprocess.Popen[bytes]] = []

    def launch(node: object) -> None:
        daemons.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))

    def replace(then: Callable[[], object]) -> list[subprocess.Popen[bytes]]:
        def init(*_: object, **__: object) -> None:
            getattr(Node, LAST)(node)
            then()

        monkeypatch.setattr(ray, "init", init)
        return daemons

    monkeypatch.setattr(Node, LAST, launch)
    monkeypatch.setattr(ray_connection, "GRACE_SECONDS", 0.1)
    with closing(FakeNode(tmp_path)) as node:
        yield replace


def test_the_work_is_done_while_the_daemons_get_ready(
    starting: Callable[..., list[subprocess.Popen[bytes]]],
) -> None:
    worked = threading.Event()
    daemons = starting(lambda: worked.wait(60) or pytest.fail("nothing was done meanwhile"))
    early = EarlyCluster([], meanwhile=worked.set)
    connection = early.take()
    assert len(connection.daemons) == len(daemons) == 1
    with pytest.raises(RuntimeError, match="taken over"):
        early.take()
    early.close()
    assert daemons[0].poll() is None, "it belongs to whoever took it over"
    connection.close()
    assert daemons[0].wait(60) == -signal.SIGKILL


def test_what_nobody_takes_over_is_ended(starting: Callable[..., list[subprocess.Popen[bytes]]]) -> None:
    daemons = starting(lambda: None)
    early = EarlyCluster([], meanwhile=lambda: None)
    early.close()
    assert daemons[0].wait(60) == -signal.SIGKILL
    with pytest.raises(RuntimeError, match="has ended"):
        early.take()


def test_a_failure_waits_for_the_run_that_reports_it(starting: Callable[..., list[subprocess.Popen[bytes]]]) -> None:
    def fail() -> None:
        raise ConnectionError("no port is free")

    daemons = starting(fail)
    early = EarlyCluster([], meanwhile=lambda: None)
    assert daemons[0].wait(60) == -signal.SIGKILL
    with pytest.raises(ConnectionError, match="no port is free"):
        early.take()
    early.close()


def test_a_ctrl_c_leaves_nothing_behind(starting: Callable[..., list[subprocess.Popen[bytes]]]) -> None:
    """Neither daemons, nor the thread."""
    begun, worked = threading.Event(), threading.Event()

    def interrupt() -> None:
        begun.wait(60)
        raise KeyboardInterrupt

    def work() -> None:
        begun.set()
        time.sleep(0.3)
        worked.set()

    daemons = starting(interrupt)
    with pytest.raises(KeyboardInterrupt):
        EarlyCluster([], meanwhile=work)
    assert worked.is_set()
    assert daemons[0].wait(60) == -signal.SIGKILL


def test_a_ctrl_c_while_only_the_work_is_waited_for_ends_the_cluster(
    starting: Callable[..., list[subprocess.Popen[bytes]]],
) -> None:
    daemons = starting(lambda: None)
    with pytest.raises(KeyboardInterrupt):
        EarlyCluster([], meanwhile=lambda: time.sleep(0.2) or os.kill(os.getpid(), signal.SIGINT) or time.sleep(0.2))
    assert daemons[0].wait(60) == -signal.SIGKILL


def test_what_the_work_raises_is_raised(starting: Callable[..., list[subprocess.Popen[bytes]]]) -> None:
    def work() -> None:
        raise ImportError("libtorch.so is missing")

    daemons = starting(lambda: None)
    with pytest.raises(ImportError, match=r"libtorch\.so is missing"):
        EarlyCluster([], meanwhile=work)
    assert daemons[0].wait(60) == -signal.SIGKILL


def test_a_thread_that_cannot_start_is_a_failure_of_the_start(
    starting: Callable[..., list[subprocess.Popen[bytes]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    daemons = starting(lambda: None)
    monkeypatch.setattr(threading.Thread, "start", full)
    early = EarlyCluster([], meanwhile=lambda: None)
    assert daemons[0].wait(60) == -signal.SIGKILL
    with pytest.raises(RuntimeError, match="can't start new thread"):
        early.take()


FORKING = "import subprocess, time\nwhile True: subprocess.Popen(['sleep', '600']); time.sleep(0.005)"


def test_a_daemon_that_starts_others_leaves_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a raylet starts its agents: none is born between the look at what there is and the kill."""
    monkeypatch.setenv("TEST_MARK", mark := f"mark-{uuid.uuid4()}")
    before = descendants(os.getpid())
    daemon = subprocess.Popen([sys.executable, "-c", FORKING])
    monkeypatch.delenv("TEST_MARK")
    while len(marked_processes(mark)) < 5:
        time.sleep(0.05)
    assert len(kill_new(before)) >= 5
    assert daemon.wait(60) == -signal.SIGKILL
    assert left_after(20, lambda: marked_processes(mark)) == []


def test_what_is_logged_meanwhile_reaches_the_log_of_the_run(
    starting: Callable[..., list[object]], caplog: pytest.LogCaptureFixture
) -> None:
    starting(lambda: logging.getLogger("separation.ray_head").warning("started whole"))
    early = EarlyCluster([], meanwhile=lambda: None)
    assert "started whole" not in caplog.text
    connection = early.take()
    assert "started whole" in caplog.text
    connection.close()
