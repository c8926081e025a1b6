"""Reward terms whose server the run starts (`reward.terms.X.serve`): checks, the command line, addresses, the worker.

The controller (controller/reward_servers.py) starts one ServerWorker per replica: it starts, watches and stops a server
with its own port, token and GPUs.
"""

import logging
import os
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from async_flowrl.config.check import ConfigError
from async_flowrl.config.error_text import unknown_name
from async_flowrl.config.schema import Config, RewardTerm, ServeConfig
from separation.program import Program

logger = logging.getLogger(__name__)

# Seconds between SIGTERM and SIGKILL when a server is stopped.
GRACE_SECONDS = 10.0
PORT_SECONDS = 15.0
MAX_PORT = 65535
# Longest wait for one answer of the health path, and the pause between two requests while the server starts.
HEALTH_SECONDS, POLL_SECONDS = 5.0, 0.2
# Pause between two requests to the health path of a running server; shorter if `hung_seconds` is below 40.
WATCH_SECONDS = 10.0
HTTP_NAME = "http"
# Names that a server's command may hold in braces.
PLACEHOLDERS = ("host", "port", "token_file")


class Addresses(NamedTuple):
    """The URLs of a term's servers, and the token that they require (None for none). Picklable."""

    urls: tuple[str, ...]
    token: str | None = None


def term_key(config: Config, term: str) -> str:
    """Returns the key of a term's section: `evaluate.reward.terms.X` for a held-out term, else `reward.terms.X`."""
    return f"{'evaluate.' if term in config.evaluate.reward.terms else ''}reward.terms.{term}"


def is_needed(config: Config, term: str) -> bool:
    """Returns True if a run cannot continue without the term's servers, because the term is trained on and required."""
    return term in config.reward.terms and config.reward.terms[term].required


def check_serve(where: str, term: RewardTerm, attribute: object) -> None:
    """Raises ValueError if a term's server cannot be started, or if its class or function would not use it."""
    wants_server: tuple[str, str] | None = getattr(attribute, "wants_server", None)
    option, example = wants_server or ("url", "")
    if term.serve is None:
        if wants_server and not term.options.get(option):
            raise ValueError(
                f"{where}: the {term.name or where.rpartition('.')[2]} reward needs options.{option}, for example "
                f"{example}, or {where}.serve for a server that the run starts itself"
            )
        return
    if not hasattr(attribute, "connect"):
        raise ValueError(
            f"{where}.serve: {term.name} asks no server; leave the name out for the http reward, or name one that has "
            "connect(urls, token)"
        )
    if term.options.get(option):
        raise ValueError(f"{where}: options.{option} and serve exclude each other; a run knows its own servers")
    _check_command(f"{where}.serve", term.serve)


def _check_command(where: str, serve: ServeConfig) -> None:
    words = command_of(serve)
    if not words:
        raise ValueError(f"{where}.command must be a text, or a list of texts, got {serve.command!r}")
    for name in re.findall(r"(?<!{){([A-Za-z_]+)}(?!})", " ".join(words)):
        if name not in PLACEHOLDERS:
            raise ValueError(unknown_name(f"a name in braces in {where}.command", name, PLACEHOLDERS))
    if not serve.health.startswith("/"):
        raise ValueError(f"{where}.health must be a path such as /health, got {serve.health!r}")
    if not any("{port}" in word for word in words) and (serve.port is None or serve.replicas > 1):
        reason = f", unless {where}.port is the one that it listens at" if serve.port is None else " of each replica"
        raise ValueError(f"{where}.command must contain {{port}}{reason}")
    if serve.port is not None and serve.port + serve.replicas > MAX_PORT + 1:
        raise ValueError(f"{where}.port {serve.port} and {serve.replicas} replicas need ports beyond {MAX_PORT}")
    if 1 < serve.gpus != int(serve.gpus):
        raise ValueError(f"{where}.gpus above 1 must be a whole number, got {serve.gpus:g}")


def command_of(serve: ServeConfig) -> list[str]:
    command = serve.command
    if isinstance(command, str):
        try:
            return shlex.split(command)
        except ValueError:
            return []
    is_texts = isinstance(command, Sequence) and all(isinstance(word, str) for word in command)
    return list(command) if is_texts else []


def search_path() -> str:
    """Returns the PATH of servers: the programs of this environment come first."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"


def check_program(config: Config, term: str, serve: ServeConfig) -> None:
    """Raises ConfigError if this machine cannot execute the command of a term's server."""
    if shutil.which(program := command_of(serve)[0], path=serve.environment.get("PATH", search_path())) is None:
        raise ConfigError(f"{term_key(config, term)}.serve.command: this machine cannot execute {program!r}")


def filled(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Replaces `{port}` and the other names in `values`. Braces around more than a name stay, for JSON."""
    return [re.sub(r"{(\w+)}", lambda name: values.get(name[1], name[0]), word) for word in words]


class ServerFailed(RuntimeError):
    """The server does not start; the message ends with the end of its output."""


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
        if reachable is None:
            from separation.head_watchdog import node_address

            reachable = node_address()
        self._host = reachable
        self._port = 0
        self._program: Program | None = None

    def start(self) -> str:
        """Starts the server and returns its URL once its health path answers 200; it reuses its port if that is free.

        Raises ServerFailed if the server ends before, or does not answer within `start_seconds`.
        """
        self.stop()
        serve = self._serve
        if serve.port is not None:
            self._port = fixed_port(self._host, serve.port + self._index)
        else:
            self._port = free_port(self._host, self._port)
        values = {"host": self._host, "port": str(self._port), "token_file": self._token_file()}
        configured = {name: text.replace("{token}", self._token) for name, text in serve.environment.items()}
        command = filled(command_of(serve), values)
        logger.info("%s: %s", self._name, " ".join(command))
        environment = {**os.environ, "PATH": search_path(), **configured}
        self._program = Program(command, environment=environment, log=self._log, grace=GRACE_SECONDS)
        url = f"http://{self._host}:{self._port}"
        self._until_healthy(self._program, f"{url}{serve.health}")
        return url

    def wait(self) -> str:
        """Waits until the server ends, and stops it if it hangs; returns the reason and the end of its output."""
        # A server hangs if its health path does not answer 200 for `hung_seconds`.
        program = self._program
        if program is None:
            return "it was not started"
        url, allowed = f"http://{self._host}:{self._port}{self._serve.health}", self._serve.hung_seconds
        pause = min(WATCH_SECONDS, allowed / 4)
        healthy = probed = time.monotonic()
        while program.exit_code() is None:
            time.sleep(min(POLL_SECONDS, pause))
            if time.monotonic() - probed < pause:
                continue
            answered = _healthy(url, seconds=min(HEALTH_SECONDS, allowed))
            probed = time.monotonic()
            if answered:
                healthy = probed
            elif probed - healthy > allowed and program.exit_code() is None:
                program.stop()
                return f"it hung: {url} did not answer 200 for hung_seconds={allowed:g}; {self._output(program)}"
        return f"it ended with exit code {program.wait()}; {self._output(program)}"

    def _output(self, program: Program) -> str:
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
                limit = f"start_seconds={self._serve.start_seconds:g}"
                raise ServerFailed(f"{url} did not answer 200 within {limit}; {self._output(program)}")
            time.sleep(POLL_SECONDS)

    def _token_file(self) -> str:
        path = self._log.with_suffix(".token")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        path.write_text(self._token, encoding="utf-8")
        return str(path)


def free_port(host: str, before: int) -> int:
    """Returns `before` if it is free (0: no preference), else any free port."""
    try:
        return _bound(host, before)
    except OSError:
        return _bound(host, 0)


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
    import httpx

    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        with httpx.Client(trust_env=False, timeout=seconds) as client, client.stream("GET", url) as response:
            return response.status_code == 200
    except httpx.TransportError:
        return False
