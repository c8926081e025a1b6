"""ScriptedJudge is an OpenAI-compatible server on loopback whose answers a test chooses, e.g. late or cut off."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Request = dict[str, Any]
Behaviour = Callable[[Request], "bytes | Awaitable[bytes]"]
"""A function: JSON body of a request → the whole HTTP response as bytes; empty bytes close the connection."""


@dataclass
class ScriptedJudge:
    """The server's state. A test may change `behaviour` at any time.

    `requests` are those received, in order.
    """

    behaviour: Behaviour
    port: int = 0
    requests: list[Request] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection, with as many requests as the client sends on it."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().split("\r\n")
                assert first == "POST /v1/chat/completions HTTP/1.1"
                headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines if line)}
                body = json.loads(await reader.readexactly(int(headers["content-length"])))
                self.requests.append(body)
                response = self.behaviour(body)
                response = response if isinstance(response, bytes) else await response
                writer.write(response)
                await writer.drain()
                if b"Connection: close" in response or not response:
                    return
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            return
        finally:
            writer.close()


@contextmanager
def scripted_judge(behaviour: Behaviour) -> Iterator[ScriptedJudge]:
    """Yields a server that runs in a thread on a free port until the block ends; open requests are then cancelled."""
    judge, started, stop = ScriptedJudge(behaviour), threading.Event(), threading.Event()

    async def serve() -> None:
        server = await asyncio.start_server(judge.serve, "127.0.0.1", 0, limit=2**26)
        judge.port = server.sockets[0].getsockname()[1]
        started.set()
        await asyncio.to_thread(stop.wait)
        server.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    started.wait()
    try:
        yield judge
    finally:
        stop.set()
        thread.join()


def http(body: bytes | str, status: str = "200 OK", *headers: str) -> bytes:
    content = body if isinstance(body, bytes) else body.encode()
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", "Content-Type: application/json", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


def completion(text: str | None, *, reason: str = "stop", first: dict[str, float] | None = None) -> bytes:
    """Returns a chat completion with the answer `text`. `first` is token → log-probability at the first token."""
    logprobs = None
    if first is not None:
        tokens = [{"token": token, "logprob": value, "bytes": None} for token, value in first.items()]
        logprobs = {"content": [{**tokens[0], "top_logprobs": tokens}]}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
    return http(json.dumps({"object": "chat.completion", "choices": [{**choice, "logprobs": logprobs}]}))
