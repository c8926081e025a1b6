"""The reward `http`: scores from a server.

The server is `async-flowrl serve-rewards`, or another one of the same contract.
docs/rewards/http.md has the contract, the options, and what happens if a server is slow, wrong or unreachable.
"""

import asyncio
import hashlib
import os
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit

from async_flowrl.config.messages import unknown_name
from async_flowrl.rewards.http_contract import (
    FORMATS,
    PATH,
    VERSION,
    ScoreReply,
    dumps,
    encode_image,
    prompt_fields,
    read_reply,
    request_body,
)
from async_flowrl.rewards.http_post import Bounds, Seen, ServerError, post
from async_flowrl.types import ByteArray, Prompt

GROUP, ONE_BY_ONE = "group", "one_by_one"
PNG, MULTIPART = "png", "multipart"


@dataclass(eq=False)
class HTTP:
    """Sends the images of a group to a server and returns its scores.

    - `url`: one URL or several, over which groups are spread; None where the term has `serve`.
    - `token_env`: environment variable with the token; None sends none.
    - `batch`: group sends all images of a group in one request, one_by_one each image in its own.
    - `encoding`: png, jpeg, or multipart (PNG files beside the JSON).
    - `timeout`, `deadline`: seconds for one attempt, and for a request with all its attempts.
    - `retries`: attempts after the first, made only if the connection fails or the status is 408, 429 or 5xx.
    - `concurrency`: largest number of requests at a time. `max_reply_bytes`: longest reply.
    - `deterministic`: True if the server always gives the same images the same scores.
    - `needs_target`: True refuses prompts without a target at the start of a run.
    """

    url: str | Sequence[str] | None = None
    token_env: str | None = None
    batch: str = GROUP
    encoding: str = PNG
    timeout: float = 60.0
    deadline: float = 240.0
    retries: int = 4
    concurrency: int = 8
    max_reply_bytes: int = 16 * 2**20
    deterministic: bool = False
    needs_target: bool = False

    wants_server: ClassVar[tuple[str, str]] = ("url", "http://127.0.0.1:8000")
    """Option that is required unless the term has `serve`, and an example of its value."""

    def __post_init__(self) -> None:
        """Raises ValueError, one sentence, for an option outside its range."""
        _check_choices(self.batch, self.encoding)
        for name in ("timeout", "deadline"):
            _check_number(name, getattr(self, name), float, above=0)
        for name, above in (("retries", -1), ("concurrency", 0), ("max_reply_bytes", 0)):
            _check_number(name, getattr(self, name), int, above=above)
        self._urls, self._token = _checked_urls(self.url), ""
        self._bounds = Bounds(self.timeout, self.deadline, self.retries, self.max_reply_bytes)
        self.seen = Seen()
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    def check(self, prompt: Prompt) -> None:
        """Raises ValueError if JSON cannot hold the prompt's metadata, or if a needed target is missing."""
        if self.needs_target and not prompt.target:
            raise ValueError(f"needs_target=true, and prompt {prompt.text!r:.80} has none in double quotes or a column")
        prompt_fields(prompt)

    def connect(self, urls: Sequence[str], token: str | None) -> None:
        """Replaces the URLs and the token by those of servers that the run has started."""
        self._urls = _checked_urls(urls)
        self._token = token or ""
        self.seen.forget()

    def __call__(self, images: ByteArray, prompt: Prompt) -> Coroutine[Any, Any, list[Any]]:
        """Encodes images uint8 [n, H, W, 3] in the caller's thread and returns a coroutine that fetches their scores.

        Raises ServerError if no URL is known yet; the coroutine raises it if a request fails.
        """
        if not self._urls:
            raise ServerError("there is no server to ask yet: neither options.url nor a server of the run that is up")
        kind = PNG if self.encoding == MULTIPART else self.encoding
        files = [encode_image(image, kind) for image in images]
        parts = [files] if self.batch == GROUP else [[file] for file in files]
        requests = [self._request(part, prompt, kind) for part in parts]
        return self._scores(requests, [len(part) for part in parts], first=prompt.index)

    def _request(self, files: Sequence[bytes], prompt: Prompt, kind: str) -> tuple[bytes, str]:
        """Returns the body and its content type."""
        if self.encoding == MULTIPART:
            return multipart(files, prompt, kind)
        return request_body(files, [prompt_fields(prompt)]), "application/json"

    async def _scores(self, requests: Sequence[tuple[bytes, str]], counts: Sequence[int], *, first: int) -> list[Any]:
        """Returns one result per image, in order. The first failure is raised after all requests have ended."""
        calls = (
            self._ask(body, kind, count, first + index)
            for index, ((body, kind), count) in enumerate(zip(requests, counts, strict=True))
        )
        replies = await asyncio.gather(*calls, return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return [result for reply in replies if isinstance(reply, ScoreReply) for result in results(reply)]

    async def _ask(self, body: bytes, content_type: str, count: int, first: int) -> ScoreReply:
        """Sends one request: the first attempt to URL `first`, modulo their number, and each retry to the next URL."""
        paths = [_endpoint(url) for url in self._urls]
        start = first % len(paths)
        headers = {"Content-Type": content_type, **self._authorization()}
        async with self._open():
            return await post(
                paths[start:] + paths[:start],
                body,
                headers,
                self._bounds,
                lambda reply: read_reply(reply, count),
                self.seen,
            )

    def _authorization(self) -> dict[str, str]:
        token = self._token
        if self.token_env is not None and not token:
            token = os.environ.get(self.token_env, "").strip()
            if not token:
                raise ServerError(f"token_env={self.token_env}: the reward worker's process has no such variable")
        return {"Authorization": f"Bearer {token}"} if token else {}

    def _open(self) -> asyncio.Semaphore:
        """Returns the semaphore that limits concurrent requests; each event loop needs its own."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = loop, asyncio.Semaphore(self.concurrency)
        return self._slots[1]


def results(reply: ScoreReply) -> list[Any]:
    """Returns the reply in the form that a reward returns: numbers, or mappings if there are extras."""
    if not reply.extras:
        return list(reply.scores)
    return [{**extra, "score": score} for score, extra in zip(reply.scores, reply.extras, strict=True)]


def multipart(files: Sequence[bytes], prompt: Prompt, kind: str) -> tuple[bytes, str]:
    """Returns the contract's request as multipart/form-data (RFC 7578): body and content type."""
    fields = dumps({"version": VERSION, "prompts": [prompt_fields(prompt)]})
    boundary = hashlib.sha256(b"".join(files)).hexdigest()
    parts = [b'name="request"\r\nContent-Type: application/json\r\n\r\n' + fields]
    parts += [
        f'name="images"; filename="{index}.{kind}"\r\nContent-Type: image/{kind}\r\n\r\n'.encode() + file
        for index, file in enumerate(files)
    ]
    head = f"--{boundary}\r\nContent-Disposition: form-data; ".encode()
    body = b"".join(head + part + b"\r\n" for part in parts) + f"--{boundary}--\r\n".encode()
    return body, f"multipart/form-data; boundary={boundary}"


def _endpoint(url: str) -> str:
    """Returns the URL itself if it has a path, else the URL with the contract's path."""
    return url if urlsplit(url).path.strip("/") else url.rstrip("/") + PATH


def _checked_urls(url: str | Sequence[str] | None) -> list[str]:
    urls = [] if not url else [url] if isinstance(url, str) else list(url)
    for each in urls:
        parts = urlsplit(each) if isinstance(each, str) else None
        if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"the http reward's url must be like http://127.0.0.1:8000, got {each!r}")
        if parts.username or parts.password:
            raise ValueError("the http reward's url must hold no password: name the token's variable in token_env")
    return urls


def _check_choices(batch: str, encoding: str) -> None:
    if batch not in (GROUP, ONE_BY_ONE):
        raise ValueError(unknown_name("the http reward's batch", str(batch), (GROUP, ONE_BY_ONE)))
    if encoding not in (*FORMATS, MULTIPART):
        raise ValueError(unknown_name("the http reward's encoding", str(encoding), (*FORMATS, MULTIPART)))


def _check_number(name: str, value: object, kind: type, *, above: int) -> None:
    allowed = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, allowed) or not above < value < float("inf"):
        what = "a number above 0" if kind is float else f"an integer from {above + 1} on"
        raise ValueError(f"the http reward's {name} must be {what}, got {value!r}")
