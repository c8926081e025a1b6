"""Ports for the ranks that a test starts."""

import socket


def free_port() -> int:
    """Returns a TCP port of this host on which nobody listens at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
