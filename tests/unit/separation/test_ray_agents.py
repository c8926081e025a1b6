"""Tests of a raylet's agents: what takes their place, and the port of one of them that is chosen before."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from ray import _raylet
from ray._private import ray_constants, services

from separation.processes import alive
from separation.ray_agents import BUILD, IDLE_AGENT, NO_PORT, UNTIL_ASKED, quick_agents
from tests.support.marked import left_after
from tests.support.ray_node import FakeNode


@pytest.fixture
def node(tmp_path: Path) -> Iterator[FakeNode]:
    with closing(FakeNode(tmp_path)) as node:
        yield node


def test_agents_are_replaced_and_only_inside(node: FakeNode) -> None:
    """The runtime-env agent by one that becomes it, at the port that is chosen; other processes are Ray's."""
    before = getattr(services, BUILD)
    environments, other = ray_constants.PROCESS_TYPE_RUNTIME_ENV_AGENT, ray_constants.PROCESS_TYPE_LOG_MONITOR
    with quick_agents(node):
        build, port = getattr(services, BUILD), str(node._ray_params.runtime_env_agent_port)
        idle = build(ray_constants.PROCESS_TYPE_DASHBOARD_AGENT, node._session_dir)
        assert str(IDLE_AGENT) in idle and IDLE_AGENT.exists() and UNTIL_ASKED not in idle
        whole = before(environments, node._session_dir)
        assert build(environments, node._session_dir) == [*idle, UNTIL_ASKED, "127.0.0.1", port, *whole]
        assert build(other, node._session_dir) == before(other, node._session_dir)
    assert getattr(services, BUILD) is before


def test_a_ray_with_other_agents_starts_its_raylet_as_ever_and_says_so(
    node: FakeNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = getattr(services, BUILD)
    monkeypatch.delattr(_raylet, "persist_port")
    with caplog.at_level(logging.WARNING), quick_agents(node):
        assert getattr(services, BUILD) is before
    assert "waits for both of its agents" in caplog.text and "persist_port" in caplog.text


def test_a_raylet_finds_the_ports_of_an_agent_that_serves_none(node: FakeNode) -> None:
    with quick_agents(node):
        for name in ("METRICS_AGENT_PORT_NAME", "METRICS_EXPORT_PORT_NAME", "DASHBOARD_AGENT_LISTEN_PORT_NAME"):
            port = _raylet.wait_for_persisted_port(node._session_dir, node._node_id, getattr(_raylet, name), 1000)
            assert port == NO_PORT


def test_the_chosen_port_is_for_the_agent_alone(node: FakeNode) -> None:
    """It binds as Ray's runtime-env agent does, while the port is still reserved."""
    with quick_agents(node):
        pass
    where = ("127.0.0.1", node._ray_params.runtime_env_agent_port)
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(where)
    with socket.socket() as agent:
        agent.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        agent.bind(where)
        agent.listen()
        with socket.create_connection(where, timeout=60):
            pass


SAYS = "import socket, sys; socket.create_server((sys.argv[1], int(sys.argv[2]))); print(sys.argv[3:], flush=True)"
"""Ray's agent: it binds the port that the idle one had."""


def test_an_agent_that_is_asked_becomes_rays_in_the_same_process(node: FakeNode) -> None:
    """Nothing is started before; the arguments are those that Ray gives."""
    with quick_agents(node):
        where = ("127.0.0.1", node._ray_params.runtime_env_agent_port)
        place = [UNTIL_ASKED, where[0], str(where[1])]
    command = [sys.executable, str(IDLE_AGENT), *place, sys.executable, "-c", SAYS, *place[1:], "--node-id=1"]
    environment = {**os.environ, "RAY_RAYLET_PID": str(os.getpid())}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as agent:
        try:
            end = time.monotonic() + 60
            while not listens(where):
                assert agent.poll() is None and time.monotonic() < end
                time.sleep(0.02)
            assert agent.communicate(timeout=60)[0] == "['--node-id=1']\n"
        finally:
            agent.kill()


def listens(where: tuple[str, int]) -> bool:
    """Whether somebody takes a connection there."""
    try:
        socket.create_connection(where, timeout=60).close()
    except ConnectionRefusedError:
        return False
    return True


PARENT = """
import os, signal, subprocess, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
os.environ["RAY_RAYLET_PID"] = str(os.getpid())
print(subprocess.Popen([sys.executable, sys.argv[1]]).pid, flush=True)
time.sleep(600)
"""
"""A raylet: it starts its agents with these signals blocked."""


def gone(agent: psutil.Process) -> bool:
    """Whether it ends within some seconds."""
    return left_after(20, lambda: [agent] if alive(agent) else []) == []


def test_an_idle_agent_whose_raylet_was_dead_before_it_started_ends() -> None:
    """Its parent is another process then, and stays the same."""
    environment = {**os.environ, "RAY_RAYLET_PID": "999999999"}
    assert subprocess.run([sys.executable, str(IDLE_AGENT)], env=environment, timeout=60).returncode == 0


def test_an_idle_agent_ends_by_sigterm() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, str(IDLE_AGENT)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        agent = psutil.Process(int(parent.stdout.readline()))
        try:
            os.kill(agent.pid, signal.SIGTERM)
            assert gone(agent)
        finally:
            os.kill(parent.pid, signal.SIGKILL)


def test_the_idle_agent_lives_as_long_as_its_parent() -> None:
    command = [sys.executable, "-c", PARENT, str(IDLE_AGENT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        agent = psutil.Process(int(parent.stdout.readline()))
        try:
            with pytest.raises(psutil.TimeoutExpired):
                agent.wait(2)
        finally:
            os.kill(parent.pid, signal.SIGKILL)
    assert gone(agent)
