"""LyingServer answers each HTTP request on loopback with the next of given answers, and records the requests."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

Answer = bytes | Callable[[bytes], bytes] | None
JSON = "Content-Type: application/json\r\n"


@dataclass
class LyingServer:
    """Sends `answers` byte by byte as they are, the last one again and again; None closes the connection instead.

    One that is a function gets the request and returns the answer. After an answer that ends with STALL, the
    connection stays silent for 60 s.
    """

    answers: Sequence[Answer]
    asked: list[bytes] = field(default_factory=list)
    """Heads and bodies of the requests."""
    times: list[float] = field(default_factory=list)
    """Time of each request, by time.monotonic()."""
    url: str = ""
    connections: int = 0

    def serve(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with connection, suppress(ConnectionError):
            while (request := _read(connection)) is not None:
                answer = self.answers[min(len(self.asked), len(self.answers) - 1)]
                self.asked.append(request)
                self.times.append(time.monotonic())
                if answer is None:
                    return
                if callable(answer):
                    answer = answer(request)
                connection.sendall(answer)
                if b"Content-Length" not in answer:
                    return
                if answer.endswith(b"STALL"):
                    time.sleep(60)


def _read(connection: socket.socket) -> bytes | None:
    data = b""
    while b"\r\n\r\n" not in data:
        if not (chunk := connection.recv(65536)):
            return None
        data += chunk
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
    while lengths and len(body) < int(lengths[0]):
        if not (chunk := connection.recv(65536)):
            return None
        body += chunk
    return head + b"\r\n\r\n" + body


def answer(status: str, body: str | bytes = "", headers: str = JSON, *, length: int | None = None) -> bytes:
    """Returns an HTTP reply; `length` is its Content-Length, None for the true length of the body."""
    content = body.encode() if isinstance(body, str) else body
    announced = len(content) if length is None else length
    return f"HTTP/1.1 {status}\r\n{headers}Content-Length: {announced}\r\n\r\n".encode() + content


@contextmanager
def lying(*answers: Answer) -> Iterator[LyingServer]:
    """Yields a server with these answers, which listens until the block ends."""
    server = LyingServer(answers)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        threading.Thread(target=server.serve, args=(listening,), daemon=True).start()
        yield server
