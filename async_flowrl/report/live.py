"""async-flowrl report RUN --live: the report of runs that still go on, served to browsers of this machine.

    GET /                                  the page
    GET /document.json                     what it draws; ETag and If-None-Match
    GET /images/<run, from 0>/<folder>/<file>   a picture below that run's images/

The standard library's server is enough for a few browsers on one machine, so that the command needs no extra packages.
"""

import base64
import errno
import hashlib
import hmac
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from async_flowrl.config.listening import LOOPBACK, ServeError, is_loopback
from async_flowrl.report.live_document import LiveDocument, may_begin
from async_flowrl.report.live_files import Picture, open_picture

PORT = 8765
MAX_CONNECTIONS = 64
REQUEST_SECONDS = 30.0
"""A connection that says nothing for so long is closed."""
HEADERS = {
    "Cache-Control": "no-cache",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
WAITING = """<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="2">
<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">
<title>{title}</title></head><body style="font: 1.1em system-ui; margin: 3em; overflow-wrap: anywhere"><h1>{title}</h1>
<p>{why}; this page looks again every two seconds.</p></body></html>
"""
TROUBLE = "Report-Trouble"
"""Header that says, percent-encoded, why the newest files cannot be read while an older document is served."""


@dataclass(frozen=True)
class Access:
    """Who may ask."""

    host: str = LOOPBACK
    token: str | None = None

    def names(self, asked: str) -> bool:
        """Whether the Host header is this machine's: a page elsewhere may have had its name point here (DNS rebinding).

        Any port: a tunnel may end at another one. Where there is a token, it decides.
        """
        try:
            name = urlsplit(f"//{asked}").hostname or ""
        except ValueError:  # "[::1", say
            return False
        return self.token is not None or is_loopback(name)

    def knows(self, authorization: str) -> bool:
        """Whether a header has the token: as a Bearer's, or as the password that browsers ask for. In constant time."""
        if self.token is None:
            return True
        kind, _, value = authorization.partition(" ")
        if kind.lower() == "basic":
            try:
                value = base64.b64decode(value, validate=True).decode().partition(":")[2]
            except ValueError:
                return False
        elif kind.lower() != "bearer":
            return False
        return hmac.compare_digest(value.encode(), self.token.encode())


class Server(ThreadingHTTPServer):
    """One thread per connection, of which there are at most MAX_CONNECTIONS; they end with the program."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], live: LiveDocument, access: Access) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.live, self.access = live, access
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer is nobody's fault."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            sys.stderr.write(f"report --live: {type(error).__name__}: {error}\n")


class Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        """Host first, then the token, then the path."""
        if not self.server.access.names(self.headers.get("Host", "")):
            self.refuse(HTTPStatus.FORBIDDEN, "this server answers to the names of this machine alone")
        elif not self.server.access.knows(self.headers.get("Authorization", "")):
            self.refuse(HTTPStatus.UNAUTHORIZED, "the token is missing or another one",
                        {"WWW-Authenticate": 'Basic realm="async-flowrl report", charset="UTF-8"'})  # fmt: skip
        else:
            self.answer(self.path.partition("?")[0])

    def do_HEAD(self) -> None:
        self.do_GET()

    def refuse_method(self) -> None:
        self.refuse(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD", {"Allow": "GET, HEAD"})

    def answer(self, path: str) -> None:
        live = self.server.live
        if path == "/":
            page = live.page()
            self.send(waiting(live.trouble) if page is None else page, "text/html; charset=utf-8")
        elif path == "/document.json":
            content = live.content()
            if content is None:
                self.refuse(HTTPStatus.SERVICE_UNAVAILABLE, live.trouble or "the run is starting")
            else:
                self.send(content, "application/json", {TROUBLE: quote(live.trouble)} if live.trouble else {})
        elif path == "/favicon.ico":  # browsers ask for it by themselves
            self.reply(HTTPStatus.NO_CONTENT, b"", {})
        elif path.startswith("/images/"):
            self.picture(unquote(path))
        else:
            self.refuse(HTTPStatus.NOT_FOUND, "there is /, /document.json and /images/")

    def picture(self, path: str) -> None:
        number, _, below = path.removeprefix("/images/").partition("/")
        runs = self.server.live.runs()
        numbered = {str(index): run for index, run in enumerate(runs)}
        picture: Picture | None = open_picture(numbered[number] / "images", below) if number in numbered else None
        if picture is None:
            self.refuse(HTTPStatus.NOT_FOUND, "no such picture")
            return
        self.send(picture.content, picture.kind)

    def send(self, content: bytes, kind: str, more: Mapping[str, str] = MappingProxyType({})) -> None:
        """The content, or 304 where the browser has it."""
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        if tag in [each.strip().removeprefix("W/") for each in self.headers.get("If-None-Match", "").split(",")]:
            self.reply(HTTPStatus.NOT_MODIFIED, b"", {"ETag": tag, **more})
        else:
            self.reply(HTTPStatus.OK, content, {"ETag": tag, "Content-Type": kind, **more})

    def refuse(self, status: HTTPStatus, sentence: str, more: Mapping[str, str] | None = None) -> None:
        self.reply(status, f"{sentence}\n".encode(), {"Content-Type": "text/plain; charset=utf-8", **(more or {})})

    def reply(self, status: HTTPStatus, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, **headers}.items():
            self.send_header(name, value)
        if status not in (HTTPStatus.NOT_MODIFIED, HTTPStatus.NO_CONTENT):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def version_string(self) -> str:
        return "async-flowrl"

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads a line for every two seconds and browser."""


def waiting(trouble: str | None) -> bytes:
    """The page before there is any document: the run has no files yet, or they cannot be read."""
    title = "The run cannot be read" if trouble else "The run is starting"
    return WAITING.format(title=title, why=escape(trouble or "It has no step yet")).encode()


for _method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"):
    setattr(Handler, f"do_{_method}", Handler.refuse_method)


def serve(folders: Sequence[Path], *, host: str, port: int | None, token: str | None) -> int:
    """Serves until Ctrl-C; returns the exit code. Raises ServeError."""
    if token is None and not is_loopback(host):
        raise ServeError(
            f"--host {host} is not this machine alone: others could read the run here; name a token with --token-env "
            f"or --token-file, or listen at {LOOPBACK}"
        )
    if wrong := [folder for folder in folders if not may_begin(folder)]:
        raise ServeError(f"{wrong[0]} is no run directory and holds none: there is no config.yaml in it or below it")
    live = LiveDocument(folders)
    with listening((host, PORT if port is None else port), live, Access(host, token)) as server:
        shown = f"[{host}]" if ":" in host else host
        what = ", ".join(map(str, folders))
        sys.stdout.write(f"live report of {what} at http://{shown}:{server.server_port}/ (Ctrl-C ends it)\n")
        sys.stdout.flush()
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            sys.stdout.write("\n")
    return 0


def listening(address: tuple[str, int], live: LiveDocument, access: Access) -> Server:
    """Raises ServeError, which names a free port where this one is taken."""
    host, port = address
    try:
        return Server(address, live, access)
    except (OSError, OverflowError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise ServeError(f"port {port} is in use: --port {free_port(host)} is free, --port 0 takes any") from error
        raise ServeError(f"cannot listen at {host} port {port}: {error}") from error


def free_port(host: str) -> int:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as found:
        return int(found.getsockname()[1])
