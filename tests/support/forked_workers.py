"""Workers of a test's Ray cluster, forked from a process that has imported ray, torch and the trainer.

A raylet starts a Python for each worker, which imports ray for half a second, and what the worker computes with for up
to four. Here it starts this file instead, by its path. That asks the server (`serve`) for a fork, which executes Ray's
own `default_worker.py` with the same arguments, environment and output, and then waits until the forked worker ends.
"""

import array
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

NAME = "TEST_WORKERS_FORKED_BY"
"""Environment variable with the name of the server's socket, which lies in no file system."""
FOR_THE_SETUP = "--language="
"""An argument for the script in whose place this file is started, not for the worker."""
STREAMS = (0, 1, 2)
LENGTH = 8
"""Bytes before a request, which say how long it is."""


@contextmanager
def forked_workers() -> Iterator[None]:
    """Inside, whoever starts a Ray node in this process gets one with such workers, until this process ends."""
    os.environ[NAME] = server()
    try:
        with in_their_place():
            yield
    finally:
        del os.environ[NAME]  # And nothing else: Ray has written there, too.


@contextmanager
def in_their_place() -> Iterator[None]:
    """The same in a process whose environment names the server; changes nothing in any other."""
    if NAME not in os.environ:
        yield
        return
    from ray._private.node import Node

    start_raylet = Node.start_raylet

    def start(node: Node, *arguments: object, **options: object) -> None:
        node._ray_params.setup_worker_path = __file__
        start_raylet(node, *arguments, **options)

    with mock.patch.object(Node, "start_raylet", start):
        yield


def server() -> str:
    """Starts a server and returns its name. Each node needs one of its own: Ray remembers the raylet of its import."""
    from tests.support.forked import CONTEXT

    name = str(uuid.uuid4())
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen(64)
        CONTEXT.Process(target=serve, args=(listener,), daemon=True).start()
    return name


def serve(listener: socket.socket) -> None:
    """Runs in the server, which has a single thread: forks a process for each request, until its parent has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for those that have ended.
    parent = os.getppid()
    while os.getppid() == parent:
        if not select.select([listener], [], [], 1.0)[0]:
            continue
        asking, _ = listener.accept()
        command, environment, folder, streams = _request(asking)
        if "ray" not in sys.modules:  # Ray reads its settings from the environment when it is imported.
            os.environ.clear()
            os.environ.update(environment)
            import ray  # noqa: F401
        if os.fork() == 0:
            listener.close()
            _become(command, environment, folder, streams)  # `asking` is closed when this process ends.
        for stream in streams:
            os.close(stream)
        asking.close()


def _request(asking: socket.socket) -> tuple[list[str], dict[str, str], str, list[int]]:
    length, streams, _, _ = socket.recv_fds(asking, LENGTH, len(STREAMS))
    with asking.makefile("rb") as text:
        command, environment, folder = json.loads(text.read(int.from_bytes(length, "big")))
    return command, environment, folder, streams


def _become(command: list[str], environment: dict[str, str], folder: str, streams: list[int]) -> None:
    """Executes a worker's command line in a process that was just forked; never returns."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for stream, given in zip(STREAMS, streams, strict=True):
            os.dup2(given, stream)
            os.close(given)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.argv = command
        sys.path[:] = [os.path.dirname(command[0]), *(path for path in sys.path if path)]
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:  # Ctrl-C, too: nothing of the server's code may go on here
        traceback.print_exc()
    os._exit(1)


def ask() -> None:
    """Runs in the process that a raylet starts."""
    command = [argument for argument in sys.argv[1:] if not argument.startswith(FOR_THE_SETUP)]
    text = json.dumps([command, dict(os.environ), os.getcwd()]).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(f"\0{os.environ[NAME]}")
        socket.send_fds(server, [len(text).to_bytes(LENGTH, "big")], array.array("i", STREAMS))
        server.sendall(text)
        server.recv(1)


if __name__ == "__main__":
    ask()
