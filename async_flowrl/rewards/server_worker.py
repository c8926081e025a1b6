"""A reward server's worker: owns one replica's program, its port, its token and the GPUs of its seat."""

import logging
import os
import secrets
import socket
import time
from pathlib import Path

from async_flowrl.config.schema import ServeConfig
from async_flowrl.rewards.served import command_of, filled
from async_flowrl.rewards.server_environment import environment_for, variables
from separation.program import Program

logger = logging.getLogger(__name__)

GRACE_SECONDS = 10.0
"""Seconds between SIGTERM and SIGKILL when a server is stopped."""
PORT_SECONDS = 15.0
HEALTH_SECONDS, POLL_SECONDS = 5.0, 0.2
"""One answer of the health path may take as long; pause before the next, while the server comes up."""
WATCH_SECONDS = 10.0
"""Pause before the next answer of the health path of a server that is up; less where `hung_seconds` is short."""


class ServerFailed(RuntimeError):
    """The server did not come up; its last words are in the message."""


class ServerWorker:
    """Lanes: `main` starts the server, `wait` watches it to its end, `stop` ends it. It ends with this process, too."""

    def __init__(
        self,
        serve: ServeConfig,
        index: int,
        name: str,
        *,
        requirements: Path | None,
        token: str,
        reachable: str | None,
        log: Path,
    ) -> None:
        """`reachable`: the address to listen at; None is that of this node, for a cluster of several."""
        self._serve, self._index, self._name = serve, index, name
        self._requirements, self._token, self._log = requirements, token, log / f"{name}.log"
        self._host = node_address() if reachable is None else reachable
        self._port = 0
        self._program: Program | None = None

    def prepare(self) -> None:
        """Makes the environment of the requirements, if there are any. Raises ValueError."""
        if self._requirements is not None:
            environment_for(self._requirements)

    def start(self) -> str:
        """Starts the server, at the port it had before where that is free; its URL, once it is healthy.

        Raises ServerFailed if it ends before, or is not healthy within `start_seconds`.
        """
        self.stop()
        serve = self._serve
        if serve.port is not None:
            self._port = fixed_port(self._host, serve.port + self._index)
        else:
            self._port = free_port(self._host, self._port)
        values = {"host": self._host, "port": str(self._port), "token_file": self._token_file()}
        environment = environment_for(self._requirements) if self._requirements is not None else None
        own = {name: text.replace("{token}", self._token) for name, text in serve.environment.items()}
        command = filled(command_of(serve), values)
        logger.info("%s: %s", self._name, " ".join(command))
        self._program = Program(
            command, environment={**os.environ, **variables(environment), **own}, log=self._log, grace=GRACE_SECONDS
        )
        url = f"http://{self._host}:{self._port}"
        self._until_healthy(self._program, f"{url}{serve.health}")
        return url

    def wait(self) -> str:
        """Waits for the end of the server, and ends one that hangs; what it was and said."""
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
        """Ends the server and all that it started."""
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
        """Beside the log, a file that only this user can read."""
        path = self._log.with_suffix(".token")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(self._token, encoding="utf-8")
        return str(path)


def new_token() -> str:
    """A token that nobody guesses; it decides nothing of a run."""
    return secrets.token_urlsafe(32)


def node_address() -> str:
    """The address at which other nodes of the cluster reach this one."""
    from separation.ray_group import node_address

    return node_address()


def free_port(host: str, before: int) -> int:
    """A port that nobody listens at: `before` if it is free (0 is none)."""
    for port in (before, 0):
        try:
            return _bound(host, port)
        except OSError:
            continue
    raise ServerFailed(f"no port is free at {host}")


def fixed_port(host: str, port: int) -> int:
    """The port. Raises ServerFailed where somebody listens at it: their answers would pass for the server's.

    A server whose worker was killed is given PORT_SECONDS to be gone.
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
    """Whether it answers 200 within as long; what else it says is not read."""
    import httpx

    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        with httpx.Client(trust_env=False, timeout=seconds) as client, client.stream("GET", url) as response:
            return response.status_code == 200
    except httpx.TransportError:
        return False
