"""ScriptedJudge is an OpenAI-compatible server on loopback whose answers a test chooses, e.g. wrong or cut off."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.lying_server import answer, lying

Request = dict[str, Any]
Behaviour = Callable[[Request], bytes]
"""A function: JSON body of a request → the whole HTTP response as bytes."""


@dataclass
class ScriptedJudge:
    """The server's state. A test may change `behaviour` at any time; `requests` are those received, in order."""

    behaviour: Behaviour
    requests: list[Request] = field(default_factory=list)
    url: str = ""

    def reply(self, asked: bytes) -> bytes:
        head, _, body = asked.partition(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
        request = json.loads(body)
        self.requests.append(request)
        return self.behaviour(request)


@contextmanager
def scripted_judge(behaviour: Behaviour) -> Iterator[ScriptedJudge]:
    """Yields a server on a free port, which listens until the block ends."""
    judge = ScriptedJudge(behaviour)
    with lying(judge.reply) as server:
        judge.url = f"{server.url}/v1"
        yield judge


def completion(text: str | None, *, reason: str = "stop", first: dict[str, float] | None = None) -> bytes:
    """Returns a chat completion with the answer `text`. `first` is token → log-probability at the first token."""
    logprobs = None
    if first is not None:
        tokens = [{"token": token, "logprob": value, "bytes": None} for token, value in first.items()]
        logprobs = {"content": [{**tokens[0], "top_logprobs": tokens}]}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}
    return answer("200 OK", json.dumps({"object": "chat.completion", "choices": [{**choice, "logprobs": logprobs}]}))
