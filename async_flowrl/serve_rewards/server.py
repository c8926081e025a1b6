"""A reward server as a program: its command-line arguments, its settings, and serving until a signal ends it.

`python -m async_flowrl.serve_rewards` and the servers in examples/reward_servers call `add_arguments` and `serve`.
"""

import argparse
import asyncio
import ipaddress
import logging
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from async_flowrl.config.messages import in_one_line
from async_flowrl.rewards.base import PromptRefused
from async_flowrl.rewards.http_contract import HEALTH, PATH, Limits
from async_flowrl.serve_rewards.app import build_app
from async_flowrl.serve_rewards.scorer import Score, Settings, call
from async_flowrl.types import Prompt

LOOPBACK = "127.0.0.1"
ALL_BYTES_FACTOR = 4
"""Default of --max-all-bytes, as a multiple of --max-bytes."""
ASK_SECONDS = 20.0
"""Seconds without a new request after which a connection is closed.

uvicorn itself would wait for a connection's first request without limit.
"""


class ServeError(ValueError):
    """Raised if a server cannot start; the message is one sentence."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for address, token and limits to `parser`."""
    limits = Limits()
    option = parser.add_argument
    option("--host", default=LOOPBACK, help="address to listen at (default: %(default)s)")
    option("--port", type=int, default=8000, help="0: any that is free (default: %(default)s)")
    option("--token-env", metavar="NAME", help="environment variable with the token that clients send")
    option("--token-file", type=Path, metavar="FILE", help="the same from a file")
    option("--max-bytes", type=int, default=limits.body_bytes, help="of a request (default: %(default)s)")
    option(
        "--max-all-bytes",
        type=int,
        help="of all requests together that arrive, wait or are scored; others get 429 (default: 4 times --max-bytes)",
    )
    option("--max-images", type=int, default=limits.images, help="per request (default: %(default)s)")
    option("--max-pixels", type=int, default=limits.pixels, help="of one image (default: %(default)s)")
    option("--max-all-pixels", type=int, default=limits.all_pixels, help="of all (default: %(default)s)")
    option("--warm-up", metavar="PROMPT", help="score a grey image of it before listening: weights are loaded then")
    option("--max-waiting", type=int, default=16, help="requests that may wait (default: %(default)s)")


def settings_of(given: argparse.Namespace) -> Settings:
    """Returns the settings of parsed arguments.

    Raises ServeError for limits below 1, a missing token, or an address that other machines reach without a token.
    """
    if given.max_all_bytes is None:
        given.max_all_bytes = ALL_BYTES_FACTOR * given.max_bytes
    for name in ("max_bytes", "max_images", "max_pixels", "max_all_pixels", "max_waiting"):
        if getattr(given, name) < 1:
            raise ServeError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(given, name)}")
    if given.max_all_bytes < given.max_bytes:
        raise ServeError(
            f"--max-all-bytes {given.max_all_bytes} is less than one request, --max-bytes {given.max_bytes}"
        )
    token = read_token(given.token_env, given.token_file)
    if token is None and not is_loopback(given.host):
        raise ServeError(
            f"--host {given.host} is not this machine alone: others could have images scored here; name a token with "
            f"--token-env or --token-file, or listen at {LOOPBACK}"
        )
    limits = Limits(given.max_bytes, given.max_images, given.max_pixels, given.max_all_pixels)
    return Settings(token, limits, given.max_waiting, given.max_all_bytes)


def read_token(variable: str | None, file: Path | None) -> str | None:
    """Returns the token from an environment variable or a file; None if neither is named.

    Raises ServeError if both are named, or if the token is missing or empty.
    """
    if variable is not None and file is not None:
        raise ServeError("--token-env and --token-file exclude each other")
    if variable is not None:
        if not (token := os.environ.get(variable, "").strip()):
            raise ServeError(f"--token-env {variable}: there is no such environment variable, or it is empty")
        return token
    if file is None:
        return None
    try:
        token = file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ServeError(f"--token-file {file} cannot be read: {error.strerror}") from error
    if not token:
        raise ServeError(f"--token-file {file} is empty")
    return token


def is_loopback(host: str) -> bool:
    """Returns True if only this machine can reach the address; any host name except localhost counts as reachable."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(score: Score, given: argparse.Namespace, what: str) -> int:
    """Serves `score` until SIGTERM or Ctrl-C and returns the exit code; `what` names the reward in the start message.

    Raises ServeError if a setting is wrong, the warm-up fails, or the address cannot be listened at.
    """
    settings = settings_of(given)
    if given.warm_up is not None:
        warm_up(score, given.warm_up)
    try:
        family = socket.AF_INET6 if ":" in given.host else socket.AF_INET
        listening = socket.create_server((given.host, given.port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        raise ServeError(f"cannot listen at {given.host} port {given.port}: {error}") from error
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    host = f"[{given.host}]" if ":" in given.host else given.host
    url = f"http://{host}:{listening.getsockname()[1]}"
    sys.stdout.write(f"serving {what} at {url} (POST {PATH}, GET {HEALTH}); Ctrl-C ends it\n")
    sys.stdout.flush()
    config = uvicorn.Config(
        build_app(score, settings),
        http=Connection,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=4 * settings.waiting + 64,
    )
    with listening, suppress(KeyboardInterrupt):  # uvicorn raises it after the requests under way
        uvicorn.Server(config).run(sockets=[listening])
    return 0


class Connection(H11Protocol):
    """A uvicorn connection that is closed if the headers of its next request do not arrive in time."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._look_again(None)

    def _look_again(self, seen: Any) -> None:
        asyncio.get_running_loop().call_later(ASK_SECONDS, self._look, seen)

    def _look(self, seen: Any) -> None:
        """Closes the connection if no request is running and none has begun since the last look.

        `seen` is the last request at the time of that look, or None.
        """
        if self.transport.is_closing():
            return
        if self.cycle is seen and (seen is None or seen.response_complete):
            self.transport.close()
            return
        self._look_again(self.cycle)


def warm_up(score: Score, prompt: str) -> None:
    """Scores one grey image, so that the reward loads its weights now. Raises ServeError if that fails."""

    grey = np.full((1, 64, 64, 3), 128, dtype=np.uint8)
    try:
        asyncio.run(call(score, grey, Prompt(0, prompt)))
    except PromptRefused as error:
        raise ServeError(f"--warm-up {prompt!r}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ServeError(f"--warm-up {prompt!r}: {in_one_line(error)}") from error
