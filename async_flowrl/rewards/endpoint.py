"""The servers of one reward: POST requests with time limits, size limits, retries and a token.

A request is repeated, at the next URL, after a failed connection, a timeout, or the status 408, 429 or 5xx. Any other
status and an unusable reply are raised at once as a ServerError. The rewards `http` and `vlm_judge` have an `Endpoint`.
"""

import asyncio
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import tenacity

from async_flowrl.rewards.http_contract import ContractError, shown
from async_flowrl.types import Requests

T = TypeVar("T")

# Seconds before the first retry, doubled for each further one, and the longest such pause.
BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.25, 30.0
# Statuses below 500 after which the request is repeated.
PASSING = (408, 429)
DAY = 86_400.0
# Options of every reward with an Endpoint: name, least and greatest value; a whole least value asks for whole numbers.
# `timeout` is the seconds of an attempt, `deadline` those of all with pauses, `concurrency` the most requests at once.
LIMITS = (("timeout", 0.001, DAY), ("deadline", 0.001, DAY), ("retries", 0, math.inf), ("concurrency", 1, math.inf))

_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = weakref.WeakKeyDictionary()


class ServerError(RuntimeError):
    """A server cannot be reached, refuses the request, or gives no usable reply."""


class PassingError(ServerError):
    """A failure that a retry may overcome; `pause` is the wait in seconds that the server asks for, or None."""

    def __init__(self, message: str, pause: float | None = None) -> None:
        super().__init__(message)
        self.pause = pause


class Endpoint:
    """The servers that one reward asks; requests are spread over their URLs."""

    def __init__(self, urls: Sequence[str], options: Mapping[str, Any], *, reply_bytes: int, token: str) -> None:
        """`options` are the reward's, those of LIMITS among them; `token` the one that names the token's variable."""
        self.urls, self._token, self._reply_bytes = list(urls), "", reply_bytes
        self._option, self._variable = token, options[token]
        self._timeout, self._deadline, self._retries, self._concurrency = (options[name] for name, _, _ in LIMITS)
        self._requests = Requests()
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    def connect(self, urls: Sequence[str], token: str | None) -> None:
        self.urls, self._token = list(urls), token or ""

    def counted(self) -> Requests:
        counted, self._requests = self._requests, Requests()
        token = self._token or os.environ.get(self._variable or "", "").strip()
        return replace(counted, last=counted.last.replace(token, "***")) if token else counted

    async def post(self, body: bytes, content_type: str, first: int, read: Callable[[bytes], T]) -> T:
        """Sends `body` and returns what `read` makes of the reply; it raises ContractError for an unusable one.

        Attempt n goes to URL `first` + n, modulo the number of URLs. Raises ServerError, which names the URL and hides
        the token, if no attempt succeeded.
        """
        if not self.urls:
            raise ServerError("there is no server to ask yet: the options name none, and no server of the run is up")
        token = self._token or os.environ.get(self._variable or "", "").strip()
        if self._variable is not None and not (token.isascii() and token.isprintable() and token):
            fault = "is no printable ASCII on one line" if token else "is not set or empty"
            raise ServerError(f"{self._option}={self._variable}: this variable {fault} in the reward worker's process")
        headers = {"Content-Type": content_type} | ({"Authorization": f"Bearer {token}"} if token else {})
        try:
            async with self._open():
                return await self._attempts(body, headers, first, read)
        except ServerError as error:
            if token and token in str(error):
                raise ServerError(str(error).replace(token, "***")) from None
            raise

    async def _attempts(self, body: bytes, headers: dict[str, str], first: int, read: Callable[[bytes], T]) -> T:
        attempts, last, url = self._retrying(), "", ""

        async def attempt() -> T:
            nonlocal last, url
            url = self.urls[(first + attempts.statistics["attempt_number"] - 1) % len(self.urls)]
            try:
                result = read(await self._once(url, body, headers))
            except (ContractError, ServerError) as error:
                failure = error if isinstance(error, ServerError) else ServerError(f"{url}: {error}")
                last = f"; the last attempt ended with: {failure}"
                self._requests += Requests(1, 1, str(failure))
                raise failure from error.__cause__
            self._requests += Requests(1)
            return result

        try:
            async with asyncio.timeout(self._deadline):
                return await attempts(attempt)
        except TimeoutError:
            failure = ServerError(f"{url} gave no score within the deadline of {self._deadline:g} s{last}")
            self._requests += Requests(1, 1, str(failure))
            raise failure from None
        except PassingError as error:
            raise ServerError(f"{error} (attempt {attempts.statistics['attempt_number']}, the last)") from error

    def _retrying(self) -> tenacity.AsyncRetrying:
        growing = tenacity.wait_exponential(multiplier=BACKOFF_SECONDS, max=MAX_BACKOFF_SECONDS)

        def pause(state: tenacity.RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            requested = error.pause if isinstance(error, PassingError) else None
            return growing(state) if requested is None else requested

        return tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(PassingError),
            stop=tenacity.stop_after_attempt(self._retries + 1),
            wait=pause,
            reraise=True,
        )

    async def _once(self, url: str, body: bytes, headers: dict[str, str]) -> bytes:
        """Returns the body of a reply of status 200. Raises PassingError if a retry makes sense, else ServerError."""
        try:
            async with asyncio.timeout(self._timeout):
                async with client().stream("POST", url, content=body, headers=headers) as response:
                    content = await _bounded(response, url, self._reply_bytes)
        except TimeoutError:
            raise PassingError(f"{url} gave no answer within {self._timeout:g} s") from None
        except httpx.TransportError as error:
            closed = "the server closed the connection" + "; it may want https" * url.startswith("http:")
            raise PassingError(f"{url}: {type(error).__name__}: {str(error) or closed}") from error
        except httpx.InvalidURL as error:
            raise ServerError(f"{url} is no URL: {error}") from error
        status = response.status_code
        if status == 200:
            return content
        if 300 <= status < 400:
            where = response.headers.get("location", "nowhere")
            raise ServerError(f"{url} answered {status}, a redirect to {where[:200]!r}; redirects are not followed")
        refused = f"{url} answered {status} {response.reason_phrase}: {shown(content)}"
        if status not in PASSING and status < 500:
            raise ServerError(refused)
        requested = response.headers.get("retry-after", "").strip()
        pause = float(requested) if requested.isdecimal() else None
        if pause is not None and pause >= self._deadline:
            raise ServerError(
                f"{refused}; it asks to wait {pause:g} s, longer than the deadline of {self._deadline:g} s"
            )
        raise PassingError(refused, pause)

    def _open(self) -> asyncio.Semaphore:
        """Returns the semaphore that limits concurrent requests; each event loop needs its own."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = loop, asyncio.Semaphore(self._concurrency)
        return self._slots[1]


def check_numbers(reward: str, options: Mapping[str, Any], ranges: Iterable[tuple[str, float, float]]) -> None:
    """Raises ValueError for a numeric option out of its range (see LIMITS), and for a `deadline` below `timeout`."""
    for name, low, high in ranges:
        value, whole = options[name], isinstance(low, int)
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not low <= value <= high:
            kind = "a whole number" if whole else "a number"
            limit = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
            raise ValueError(f"the {reward} reward's {name} must be {kind} {limit}, got {value!r}")
    deadline, timeout = options["deadline"], options["timeout"]
    if deadline < timeout:
        raise ValueError(f"the {reward} reward's {deadline=:g} is shorter than one attempt, {timeout=:g}")


def checked_urls(what: str, option: str | Sequence[str] | None, example: str, token_option: str) -> list[str]:
    """Returns one URL or several as a list without trailing slashes, empty for None. Raises ValueError."""
    urls = [] if not option else [option] if isinstance(option, str) else list(option)
    for url in urls:
        try:
            parts = urlsplit(url)
            secret = "@" in parts.netloc
            possible = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except (ValueError, TypeError, AttributeError):  # a port beyond 65535, half an IPv6 address, no text
            possible, secret = False, "@" in str(url)
        if secret:
            raise ValueError(f"{what} must hold no password: name the token's variable in {token_option}")
        if not possible:
            raise ValueError(f"{what} must be like {example}, with a port from 1 to 65535, got {url!r}")
    return [url.rstrip("/") for url in urls]


async def _bounded(response: httpx.Response, url: str, limit: int) -> bytes:
    """Returns the whole body. Raises ServerError if it is longer than `limit` bytes, or compressed unasked."""
    if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
        raise ServerError(f"{url} answered in the encoding {encoding[:40]!r}, which was not asked for")
    content = bytearray()
    async for chunk in response.aiter_raw():
        content += chunk
        if len(content) > limit:
            raise ServerError(f"{url} answered with more than {limit} bytes")
    return bytes(content)


def client() -> httpx.AsyncClient:
    """Returns the HTTP client of the running event loop, which all terms of a worker share."""
    loop = asyncio.get_running_loop()
    logging.getLogger("httpx").setLevel(logging.WARNING)  # httpx logs every request at INFO
    if loop not in _clients:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        headers = {"Accept-Encoding": "identity", "User-Agent": "async-flowrl"}
        _clients[loop] = httpx.AsyncClient(timeout=None, limits=limits, headers=headers, trust_env=False)
    return _clients[loop]
