"""HTTP server of the live report (async-flowrl report RUN --live), for runs that still go on.

    GET /                                       the page
    GET /document.json                          the document that the page draws; supports ETag and If-None-Match
    GET /images/<run, from 0>/<folder>/<file>   a picture below that run's images/

It uses the server of the standard library, which is enough for a few browsers and needs no extra packages. By default
it listens on the loopback address only; another address needs a token.
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
"""A connection that sends nothing for this long is closed."""
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
"""Response header of an old document: the reason, percent-encoded, why the newest files cannot be read."""


@dataclass(frozen=True)
class Access:
    """Access rules of the server; `token` is None if requests need no token."""

    host: str = LOOPBACK
    token: str | None = None

    def names(self, asked: str) -> bool:
        """True if the Host header `asked` names this machine (any port), or if a token is required anyway.

        This protects against DNS rebinding: a foreign page whose host name was made to point to this machine.
        """
        try:
            name = urlsplit(f"//{asked}").hostname or ""
        except ValueError:  # e.g. "[::1"
            return False
        return self.token is not None or is_loopback(name)

    def knows(self, authorization: str) -> bool:
        """True if the header has the token, as a Bearer token or as the password of Basic authentication.

        The comparison takes constant time. Always true if no token is required.
        """
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
    """Server with one daemon thread per connection; further connections than MAX_CONNECTIONS are closed at once."""

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
        """Writes errors to stderr, except those of a browser that disconnects during an answer."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            sys.stderr.write(f"report --live: {type(error).__name__}: {error}\n")


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD; other methods get 405."""

    server: Server
    timeout = REQUEST_SECONDS

    def do_GET(self) -> None:
        """Checks the Host header (403), then the token (401), then answers."""
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
        """Sends the content, or 304 if the browser has it already (If-None-Match)."""
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
        """Does nothing: pages ask every two seconds, and a log line for each request would be useless."""


def waiting(trouble: str | None) -> bytes:
    """The page that is shown while there is no document: the run has no files yet, or `trouble` says what is wrong."""
    title = "The run cannot be read" if trouble else "The run is starting"
    return WAITING.format(title=title, why=escape(trouble or "It has no step yet")).encode()


for _method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"):
    setattr(Handler, f"do_{_method}", Handler.refuse_method)


def serve(folders: Sequence[Path], *, host: str, port: int | None, token: str | None) -> int:
    """Serves the report of `folders` until Ctrl-C; returns the exit code 0. `port` None means PORT, 0 any free one.

    Raises ServeError if the host needs a token, a folder holds no run, or the address cannot be used.
    """
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
    """The server at `address`. Raises ServeError if it cannot listen there, with a free port if this one is in use."""
    host, port = address
    try:
        return Server(address, live, access)
    except (OSError, OverflowError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise ServeError(f"port {port} is in use: --port {free_port(host)} is free, --port 0 takes any") from error
        raise ServeError(f"cannot listen at {host} port {port}: {error}") from error


def free_port(host: str) -> int:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        return int(server.getsockname()[1])
