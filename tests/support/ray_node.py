"""A node without processes, with what the start of a head node reads and sets of Ray's `Node`."""

import socket
from pathlib import Path

from ray._private.parameter import RayParams


class FakeNode:
    """Takes the place of Ray's node; `session` is the folder in which daemons find each other's ports."""

    _webui_url: str | None = None
    _node_id = "1234"
    _node_ip_address = "127.0.0.1"
    runtime_env_agent_socket: socket.socket | None = None

    def __init__(self, session: Path) -> None:
        self._session_dir = str(session)
        self._ray_params = RayParams()

    def close(self) -> None:
        if self.runtime_env_agent_socket is not None:
            self.runtime_env_agent_socket.close()
