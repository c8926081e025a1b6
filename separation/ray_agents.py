"""`quick_agents` lets a raylet start without waiting for the imports of its two agents, which takes a second.

A raylet is not ready before both agents have told it their ports. Its dashboard agent serves the dashboard and metrics,
which a cluster that is started here does not have; an idle process takes its place (ray_idle_agent.py). The runtime-env
agent prepares the environments of workers that ask for one of their own, which no worker of a run does. It gets a port
that is chosen before, at which such a process listens; it becomes the agent when the raylet asks for an environment.
"""

import logging
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

BUILD = "_build_python_executable_command_memory_profileable"
"""Function of ray._private.services that builds the command of an agent."""
IDLE_AGENT = Path(__file__).with_name("ray_idle_agent.py")
UNTIL_ASKED = "--until-asked"
"""Argument of the idle agent, before an address, a port and the command that it becomes when somebody connects."""
UNUSED_PORTS = ("METRICS_AGENT_PORT_NAME", "METRICS_EXPORT_PORT_NAME", "DASHBOARD_AGENT_LISTEN_PORT_NAME")
"""Constants of ray._raylet with the names of the dashboard agent's ports."""
NO_PORT = -1
"""What Ray's own dashboard agent tells as its ports if it serves none."""


@contextmanager
def quick_agents(node: Any) -> Iterator[None]:
    """Context in which Ray's `node` starts its raylet as described above.

    With a version of Ray that has other agents, a line is logged and the raylet starts as ever.
    """
    try:
        from ray._private import services

        command = _prepared(node)
    except (AttributeError, ImportError, TypeError) as error:
        log.warning("Ray's raylet waits for both of its agents, which takes a second: %s", error)
        yield
        return
    build = getattr(services, BUILD)
    setattr(services, BUILD, command)
    try:
        yield
    finally:
        setattr(services, BUILD, build)


def _prepared(node: Any) -> Callable[..., list[str]]:
    """Chooses the ports of a node's agents, and returns the function that builds the commands which start them.

    Raises AttributeError, ImportError or TypeError with another version of Ray, before anything is changed.
    """
    from ray import _raylet
    from ray._private import ray_constants, services

    core: Any = _raylet
    build, persist = getattr(services, BUILD), core.persist_port
    dashboard, environments = (
        ray_constants.PROCESS_TYPE_DASHBOARD_AGENT,
        ray_constants.PROCESS_TYPE_RUNTIME_ENV_AGENT,
    )
    names = [getattr(core, name) for name in UNUSED_PORTS]
    where, ports, address = (node._session_dir, node._node_id), node._ray_params, node._node_ip_address
    _ = ports.runtime_env_agent_port
    for name in names:
        persist(*where, name, NO_PORT)
    # It stays bound, so that nobody gets this port before the agent listens at it.
    node.runtime_env_agent_socket = reserved = _bound(address)
    ports.runtime_env_agent_port = reserved.getsockname()[1]
    idle = [sys.executable, "-E", "-S", str(IDLE_AGENT)]
    asked = [UNTIL_ASKED, address, str(ports.runtime_env_agent_port)]

    def command(component: str, *arguments: Any, **options: Any) -> list[str]:
        if component == dashboard:
            return idle
        whole: list[str] = build(component, *arguments, **options)
        return [*idle, *asked, *whole] if component == environments else whole

    return command


def _bound(address: str) -> socket.socket:
    """Returns a socket that is bound to a free port of an IPv4 or IPv6 address; one that listens may share the port."""
    family, kind, *_, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(where)
    return bound
