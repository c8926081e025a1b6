"""Takes the place of an agent that a raylet starts: does nothing, and ends when the raylet ends.

It is executed by its path, without any package. The raylet ends if this process ends. It must not take its parent for
the raylet without a look: the raylet may be dead before Python has started.

With `--until-asked`, an IP address, a port and a command, it listens there and becomes the command as soon as somebody
connects. That connection is broken off; a raylet tries again until its agent answers. Other arguments are ignored: they
are those of Ray's agent.
"""

import os
import select
import signal
import socket
import sys


def listening(address: str, port: str) -> socket.socket:
    """Returns a socket that listens at the port, which another one may have bound that does not listen."""
    family, kind, *_, where = socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(where)
    listener.listen()
    return listener


def wanted(raylet: int, listeners: list[socket.socket]) -> bool:
    """Waits until somebody connects, and returns True; returns False when the raylet has ended."""
    while os.getppid() == raylet:
        if select.select(listeners, [], [], 1.0)[0]:
            return True
    return False


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # A raylet starts its agents with signals blocked.
    listeners, command = list[socket.socket](), list[str]()
    if sys.argv[1:2] == ["--until-asked"]:
        listeners, command = [listening(*sys.argv[2:4])], sys.argv[4:]
    if wanted(int(os.environ["RAY_RAYLET_PID"]), listeners):
        for listener in listeners:
            listener.close()
        os.execv(command[0], command)
