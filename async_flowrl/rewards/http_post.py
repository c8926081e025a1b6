"""POST requests to servers that may be slow, busy or unreachable, with time limits, size limits and retries.

A request is repeated only after a failed connection or the status 408, 429 or 5xx. Any other status, a timeout, or an
unusable reply is raised at once as a ServerError. The rewards `http` and `vlm_judge` call `post`.
"""

import asyncio
import email.utils
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import httpx
import tenacity

from async_flowrl.rewards.http_contract import ContractError, shown

T = TypeVar("T")

BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.25, 30.0
"""Seconds before the first retry, doubled for each further one, and the longest such pause."""
PASSING = (408, 429)
"""Statuses below 500 after which the request is repeated."""

SLOW_SECONDS = 300.0
"""Seconds for which a server that timed out is asked only after the others."""

_clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = weakref.WeakKeyDictionary()


class ServerError(RuntimeError):
    """Raised if a server cannot be reached, refuses the request, or gives no usable reply."""


class PassingError(ServerError):
    """A failure that a retry may overcome; `pause` is the wait in seconds that the server asks for, or None."""

    def __init__(self, message: str, pause: float | None = None) -> None:
        super().__init__(message)
        self.pause = pause


class StalledError(ServerError):
    """Raised if a server gave no answer within the timeout of an attempt."""


@dataclass(frozen=True)
class Bounds:
    """Limits of a request.

    `timeout` is in seconds per attempt, `deadline` in seconds for all attempts with their pauses; `reply_bytes` is the
    largest reply.
    """

    timeout: float
    deadline: float
    retries: int
    reply_bytes: int


def seen_by(reward: object) -> "Seen | None":
    """Returns the record in the reward's attribute `seen`; None if it has none."""
    seen = getattr(reward, "seen", None)
    return seen if isinstance(seen, Seen) else None


@dataclass
class Seen:
    """The record of one reward in one worker process."""

    _slow: dict[str, float] = field(default_factory=dict)
    """URL → `time.monotonic()` seconds until which it is asked last."""
    _answered: dict[str, bool] = field(default_factory=dict)
    """URL → True if it has answered since the last `take`, False if it has only timed out."""

    def ordered(self, urls: Sequence[str]) -> list[str]:
        """Returns the URLs in the given order, with those that timed out in the last SLOW_SECONDS moved to the end."""
        now = time.monotonic()
        return sorted(urls, key=lambda url: self._slow.get(url, now) > now)

    def stalled(self, url: str) -> None:
        """Records that the server gave no answer within the timeout of one attempt."""
        self._slow[url] = time.monotonic() + SLOW_SECONDS
        self._answered.setdefault(url, False)

    def answered(self, url: str) -> None:
        """Records that the server gave an answer, whether it was usable or not."""
        self._answered[url] = True

    def forget(self) -> None:
        """Clears the record, because the servers have been replaced."""
        self._slow.clear()
        self._answered.clear()

    def take(self) -> dict[str, bool]:
        """Returns URL → whether it has answered, for the URLs recorded since the last call, and starts anew."""
        taken, self._answered = self._answered, {}
        return taken


async def post(
    urls: Sequence[str],
    body: bytes,
    headers: Mapping[str, str],
    bounds: Bounds,
    read: Callable[[bytes], T],
    seen: Seen,
) -> T:
    """Sends `body` and returns what `read` makes of the reply; attempt n goes to URL n, modulo the number of URLs.

    URLs that timed out recently are asked last; `seen` records answers and timeouts. `read` raises ContractError for an
    unusable reply. Raises ServerError, which names the URL, if no attempt succeeded.
    """
    following = itertools.cycle(seen.ordered(urls))
    attempts, said, url = _attempts(bounds), "", urls[0]

    async def attempt() -> T:
        nonlocal said, url
        url = next(following)
        try:
            return read(await _once(url, body, headers, bounds, seen))
        except StalledError:
            seen.stalled(url)
            raise
        except ContractError as error:
            raise ServerError(f"{url}: {error}") from error
        except PassingError as error:
            said = f"; the last attempt ended with: {error}"
            raise

    try:
        async with asyncio.timeout(bounds.deadline):
            return await attempts(attempt)
    except TimeoutError:
        raise ServerError(f"{url} gave no score within the deadline of {bounds.deadline:g} s{said}") from None
    except PassingError as error:
        raise ServerError(f"{error} (attempt {attempts.statistics['attempt_number']}, the last)") from error


async def _once(url: str, body: bytes, headers: Mapping[str, str], bounds: Bounds, seen: Seen) -> bytes:
    """Returns the body of a reply of status 200. Raises PassingError if a retry makes sense, else ServerError."""
    try:
        async with asyncio.timeout(bounds.timeout):
            async with client().stream("POST", url, content=body, headers=dict(headers)) as response:
                content = await _bounded(response, url, bounds.reply_bytes)
                seen.answered(url)
    except TimeoutError:
        raise StalledError(f"{url} gave no answer within {bounds.timeout:g} s") from None
    except httpx.TransportError as error:
        raise PassingError(f"{url}: {type(error).__name__}: {error}") from error
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
    pause = retry_after(response.headers.get("retry-after"), time.time())
    if pause is not None and pause >= bounds.deadline:
        raise ServerError(f"{refused}; it asks to wait {pause:g} s, longer than the deadline of {bounds.deadline:g} s")
    raise PassingError(refused, pause)


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
    if (known := _clients.get(loop)) is None:
        known = _clients[loop] = httpx.AsyncClient(
            timeout=None,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            headers={"Accept-Encoding": "identity", "User-Agent": "async-flowrl"},
            follow_redirects=False,
            trust_env=False,
        )
    return known


def retry_after(header: str | None, now: float) -> float | None:
    """Returns the seconds of a Retry-After header (RFC 9110), a number or a date; None if it is unusable."""
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - now)
    except ValueError:
        return None


def _attempts(bounds: Bounds) -> tenacity.AsyncRetrying:
    growing = tenacity.wait_exponential(multiplier=BACKOFF_SECONDS, max=MAX_BACKOFF_SECONDS)

    def pause(state: tenacity.RetryCallState) -> float:
        failed = state.outcome.exception() if state.outcome else None
        asked = failed.pause if isinstance(failed, PassingError) else None
        return growing(state) if asked is None else asked

    return tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(PassingError),
        stop=tenacity.stop_after_attempt(bounds.retries + 1),
        wait=pause,
        reraise=True,
    )
