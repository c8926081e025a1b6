"""The worker of a reward server: it starts, watches and stops one replica, with its own port, token and GPUs.

The controller (controller/reward_servers.py) starts one ServerWorker per replica of each term with `serve`.
"""

import logging
import os
import secrets
import socket
import sys
import time
from pathlib import Path

from async_flowrl.config.schema import ServeConfig
from async_flowrl.rewards.served import command_of, filled
from separation.program import Program

logger = logging.getLogger(__name__)

GRACE_SECONDS = 10.0
"""Seconds between SIGTERM and SIGKILL when a server is stopped."""
PORT_SECONDS = 15.0
HEALTH_SECONDS, POLL_SECONDS = 5.0, 0.2
"""Longest wait for one answer of the health path, and the pause between two requests while the server starts."""
WATCH_SECONDS = 10.0
"""Pause between two requests to the health path of a running server; shorter if `hung_seconds` is below 40."""


class ServerFailed(RuntimeError):
    """Raised if the server does not start; the message ends with the end of its output."""


class ServerWorker:
    """One replica of a reward server.

    Its methods run on three lanes (threads of the worker, which run side by side): `main` starts the server, `wait`
    watches it until it ends, `stop` ends it. The server also ends when this process does.
    """

    def __init__(
        self,
        serve: ServeConfig,
        index: int,
        name: str,
        *,
        token: str,
        reachable: str | None,
        log: Path,
    ) -> None:
        """`reachable` is the address to listen at; None takes this node's address, for a cluster of several nodes."""
        self._serve, self._index, self._name = serve, index, name
        self._token, self._log = token, log / f"{name}.log"
        self._host = node_address() if reachable is None else reachable
        self._port = 0
        self._program: Program | None = None

    def start(self) -> str:
        """Starts the server and returns its URL once its health path answers 200.

        It reuses its previous port if that is free. Raises ServerFailed if the server ends before, or does not answer
        within `start_seconds`.
        """
        self.stop()
        serve = self._serve
        if serve.port is not None:
            self._port = fixed_port(self._host, serve.port + self._index)
        else:
            self._port = free_port(self._host, self._port)
        values = {"host": self._host, "port": str(self._port), "token_file": self._token_file()}
        own = {name: text.replace("{token}", self._token) for name, text in serve.environment.items()}
        command = filled(command_of(serve), values)
        logger.info("%s: %s", self._name, " ".join(command))
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        environment = {**os.environ, "PATH": path, **own}
        self._program = Program(command, environment=environment, log=self._log, grace=GRACE_SECONDS)
        url = f"http://{self._host}:{self._port}"
        self._until_healthy(self._program, f"{url}{serve.health}")
        return url

    def wait(self) -> str:
        """Waits until the server ends, and stops it if it hangs; returns the reason and the end of its output.

        A server hangs if its health path does not answer 200 for `hung_seconds`.
        """
        program = self._program
        if program is None:
            return "it was not started"
        url, allowed = f"http://{self._host}:{self._port}{self._serve.health}", self._serve.hung_seconds
        pause = min(WATCH_SECONDS, allowed / 4)
        healthy = looked = time.monotonic()
        while program.exit_code() is None:
            time.sleep(min(POLL_SECONDS, pause))
            if time.monotonic() - looked < pause:
                continue
            answered = _healthy(url, seconds=min(HEALTH_SECONDS, allowed))
            looked = time.monotonic()
            if answered:
                healthy = looked
            elif looked - healthy > allowed and program.exit_code() is None:
                program.stop()
                return f"it hung: {url} did not answer 200 for hung_seconds={allowed:g}; {self._said(program)}"
        return f"it ended with exit code {program.wait()}; {self._said(program)}"

    def _said(self, program: Program) -> str:
        return f"its output is in {self._log} and ends with: {program.tail()!r}"

    def stop(self) -> None:
        """Ends the server and all processes that it started, and deletes the token file."""
        if self._program is not None:
            self._program.stop()
        self._log.with_suffix(".token").unlink(missing_ok=True)

    def _until_healthy(self, program: Program, url: str) -> None:
        end = time.monotonic() + self._serve.start_seconds
        while True:
            if program.exit_code() is not None:
                raise ServerFailed(self.wait())
            if _healthy(url):
                return
            if time.monotonic() > end:
                program.stop()
                raise ServerFailed(
                    f"{url} did not answer 200 within start_seconds={self._serve.start_seconds:g}; "
                    f"{self._said(program)}"
                )
            time.sleep(POLL_SECONDS)

    def _token_file(self) -> str:
        """Writes the token to a file beside the log that only this user can read; returns its path."""
        path = self._log.with_suffix(".token")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(self._token, encoding="utf-8")
        return str(path)


def new_token() -> str:
    """Returns a random token from the operating system; it does not influence the run's results."""
    return secrets.token_urlsafe(32)


def node_address() -> str:
    """Returns the address at which other nodes of the cluster reach this node."""
    from separation.head_watchdog import node_address

    return node_address()


def free_port(host: str, before: int) -> int:
    """Returns `before` if it is free (0: no preference), else any free port. Raises ServerFailed if there is none."""
    for port in (before, 0):
        try:
            return _bound(host, port)
        except OSError:
            continue
    raise ServerFailed(f"no port is free at {host}")


def fixed_port(host: str, port: int) -> int:
    """Returns `port` once it is free, and waits up to PORT_SECONDS for a stopped server to release it.

    Raises ServerFailed if another program listens there, because its answers would be taken for the server's.
    """
    end = time.monotonic() + PORT_SECONDS
    while True:
        try:
            return _bound(host, port)
        except OSError as error:
            if time.monotonic() > end:
                raise ServerFailed(
                    f"serve.port: {host} port {port} is taken ({error.strerror}), perhaps by another run's server; end "
                    "that program, or choose another port (null: any that is free)"
                ) from error
        time.sleep(POLL_SECONDS)


def _bound(host: str, port: int) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return int(probe.getsockname()[1])


def _healthy(url: str, *, seconds: float = HEALTH_SECONDS) -> bool:
    """Returns True if the URL answers 200 within `seconds`; the body is not read."""
    import httpx

    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        with httpx.Client(trust_env=False, timeout=seconds) as client, client.stream("GET", url) as response:
            return response.status_code == 200
    except httpx.TransportError:
        return False
