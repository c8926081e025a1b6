"""Tests of a cluster that is started before its run is prepared; `ray.init` is replaced by what it might do."""

import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import ray
from ray._private.node import Node

from separation import ray_connection
from separation.early_cluster import EarlyCluster
from separation.ray_head import LAST


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], list[subprocess.Popen[bytes]]]:
    """Makes `ray.init` launch one daemon, and then do what the test gives; returns the daemons."""
    daemons: list[subprocess.Popen[bytes]] = []

    def launch(node: object) -> None:
        daemons.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))

    def replace(then: Callable[[], object]) -> list[subprocess.Popen[bytes]]:
        def init(*_: object, **__: object) -> None:
            getattr(Node, LAST)(None)
            then()

        monkeypatch.setattr(ray, "init", init)
        return daemons

    monkeypatch.setattr(Node, LAST, launch)
    monkeypatch.setattr(ray_connection, "GRACE_SECONDS", 0.1)
    return replace


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
    def interrupt() -> None:
        raise KeyboardInterrupt

    daemons = starting(interrupt)
    with pytest.raises(KeyboardInterrupt):
        EarlyCluster([], meanwhile=lambda: None)
    assert daemons[0].wait(60) == -signal.SIGKILL


def test_what_is_logged_meanwhile_reaches_the_log_of_the_run(
    starting: Callable[..., list[object]], caplog: pytest.LogCaptureFixture
) -> None:
    starting(lambda: logging.getLogger("separation.ray_head").warning("started whole"))
    early = EarlyCluster([], meanwhile=lambda: None)
    assert "started whole" not in caplog.text
    connection = early.take()
    assert "started whole" in caplog.text
    connection.close()
