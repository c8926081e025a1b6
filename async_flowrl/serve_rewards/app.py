"""The HTTP application of a reward server: checks of token and sizes, scoring in turn, and error replies.

`server.py` runs it with uvicorn; docs/rewards/http.md describes requests and replies.
"""

import asyncio
import hmac
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from async_flowrl.rewards import http_contract as contract
from async_flowrl.rewards import http_pickle
from async_flowrl.rewards.base import RewardError
from async_flowrl.rewards.http_contract import ContractError, Limits, ScoreReply, ScoreRequest
from async_flowrl.rewards.http_dialects import DIALECTS, flow_factory_request, flow_grpo_request
from async_flowrl.rewards.results import Result, group_result
from async_flowrl.serve_rewards.bodies import Full, Room, Share
from async_flowrl.types import ByteArray, Prompt

logger = logging.getLogger(__name__)

Score = Callable[[ByteArray, Prompt], Sequence[Any] | Awaitable[Sequence[Any]]]
"""A reward: images uint8 [n, H, W, 3] of one prompt → one result per image. It is called for one group at a time."""

OWN, FLOW_GRPO, FLOW_FACTORY = "async_flowrl", "flow_grpo", "flow_factory"
BODY_SECONDS = 60.0
"""Seconds within which the whole body of a request must arrive; otherwise the reply is 408."""


class Refused(Exception):
    """Raised to answer a request with an error: HTTP status, one sentence, and optionally seconds for Retry-After."""

    def __init__(self, status: int, sentence: str, *, retry_after: int | None = None) -> None:
        super().__init__(sentence)
        self.status, self.retry_after = status, retry_after


@dataclass(frozen=True)
class Settings:
    """Settings of the application; server.py makes them from the command line.

    `dialect` is served beside our own contract. `waiting` is the number of requests that may wait beside the one being
    scored. `all_bytes` limits the bodies of all requests that arrive, wait or are scored, together. `token=None` asks
    for no token.
    """

    token: str | None = None
    limits: Limits = field(default_factory=Limits)
    dialect: str = OWN
    waiting: int = 16
    all_bytes: int = 1024 * 2**20


class Scorer:
    """Scores requests one at a time, in order of arrival, so a reward need not be thread-safe."""

    def __init__(self, score: Score, settings: Settings) -> None:
        self._score, self._settings = score, settings
        self.room = Room(settings.all_bytes)
        self._turn, self._waiting = asyncio.Lock(), 0

    async def reply(self, request: ScoreRequest) -> ScoreReply:
        """Scores a request.

        Raises Refused: 429 if too many requests wait, 400, 413 or 422 for bad input, 500 if the reward fails.
        """
        if self._waiting > self._settings.waiting:
            raise Refused(429, f"{self._waiting} requests are waiting already; ask again later", retry_after=1)
        self._waiting += 1
        try:
            async with self._turn:
                return await self._scored(request)
        finally:
            self._waiting -= 1

    async def _scored(self, request: ScoreRequest) -> ScoreReply:
        try:
            images = await asyncio.to_thread(contract.decode_images, request.images, self._settings.limits)
        except ContractError as error:
            raise _refused(error) from error
        pairs = list(zip(images, request.prompts, strict=True))
        results = [
            await self._group(np.stack([image for image, _ in group]), group[0][1])
            for group in (list(members) for _, members in groupby(pairs, key=_group_key))
        ]
        scores = tuple(score for result in results for score in result.scores)
        extras = tuple(extra for result in results for extra in _per_image(result))
        return ScoreReply(scores, extras if any(extras) else ())

    async def _group(self, images: ByteArray, prompt: Prompt) -> Result:
        try:
            returned = await asyncio.to_thread(self._score, images, prompt)
            if inspect.isawaitable(returned):
                returned = await returned
            return group_result("the reward", returned, len(images))
        except RewardError as error:
            logger.exception("a group could not be scored")
            raise Refused(500, str(error)) from error
        except ValueError as error:
            raise Refused(422, str(error)) from error
        except Exception as error:
            logger.exception("a group could not be scored")
            raise Refused(500, f"the reward failed: {type(error).__name__}: {error}") from error


def _group_key(pair: tuple[ByteArray, Prompt]) -> tuple[Any, ...]:
    """Returns the key of a group: neighbouring images of equal size and prompt are scored in one call."""
    image, prompt = pair
    return image.shape, prompt.text, prompt.target, prompt.negative, repr(prompt.metadata)


def _per_image(result: Result) -> list[dict[str, float | str]]:
    return [{name: values[i] for name, values in result.extras.items()} for i in range(len(result.scores))]


def build_app(score: Score, settings: Settings) -> FastAPI:
    """Returns the application that serves `score` by our contract, and by `settings.dialect` if that is another one."""
    app = FastAPI(title="async-flowrl rewards", docs_url=None, redoc_url=None, openapi_url=None)
    scorer = Scorer(score, settings)

    @app.get(contract.HEALTH)
    async def health() -> dict[str, Any]:
        return {"status": "ok", "version": contract.VERSION}

    @app.post(contract.PATH)
    async def own(request: Request) -> Response:
        return await _answer(_own, contract.reply_body, request, scorer, settings)

    if settings.dialect == FLOW_FACTORY:

        @app.post(DIALECTS[FLOW_FACTORY].path)
        async def flow_factory(request: Request) -> Response:
            return await _answer(_flow_factory, _rewards, request, scorer, settings)

    if settings.dialect == FLOW_GRPO:

        @app.post(DIALECTS[FLOW_GRPO].path)
        async def flow_grpo(request: Request) -> Response:
            response = await _answer(_flow_grpo, _pickled, request, scorer, settings)
            response.headers["content-type"] = DIALECTS[FLOW_GRPO].content_type
            return response

    return app


async def _answer(
    read: Callable[[Request, bytes, Limits], Awaitable[ScoreRequest]],
    write: Callable[[ScoreReply], bytes],
    request: Request,
    scorer: Scorer,
    settings: Settings,
) -> Response:
    """Answers one request: checks the token, then the sizes, then the content, and then scores it."""
    try:
        _check_token(request, settings.token)
        with scorer.room.share() as share:
            try:
                asked = await read(request, await _body(request, settings.limits.body_bytes, share), settings.limits)
            except ContractError as error:
                raise _refused(error) from error
            return Response(write(await scorer.reply(asked)), media_type="application/json")
    except Refused as refused:
        logger.warning("%s %s: %d %s", request.client.host if request.client else "?", request.url.path,
                       refused.status, refused)  # fmt: skip
        headers = {} if refused.retry_after is None else {"Retry-After": str(refused.retry_after)}
        if refused.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        fields = {"version": contract.VERSION, "error": str(refused)}
        content = http_pickle.dumps(fields) if write is _pickled else contract.dumps(fields)
        return Response(content, refused.status, headers, media_type="application/json")


def _refused(error: ContractError) -> Refused:
    return Refused(413 if isinstance(error, contract.TooMuch) else 400, str(error))


def _check_token(request: Request, token: str | None) -> None:
    """Compares the token in constant time, so that response times do not reveal it. Raises Refused with status 401."""
    if token is None:
        return
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
        raise Refused(401, "the header 'Authorization: Bearer TOKEN' is missing, or names another token")


async def _body(request: Request, limit: int, share: Share) -> bytes:
    """Returns the body of a request. Raises Refused as soon as it is too long or too slow, or finds no room."""
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > limit:
        raise Refused(413, f"the request has {announced} bytes, more than {limit}")
    body = bytearray()
    try:
        share.grow(int(announced) if announced.isdecimal() else 0)
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                if len(body) + len(chunk) > limit:
                    raise Refused(413, f"the request has more than {limit} bytes")
                share.grow(len(body) + len(chunk))
                body += chunk
    except TimeoutError:
        raise Refused(408, f"the request did not arrive within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise Refused(400, f"the client hung up after {len(body)} bytes of the request") from None
    except Full:
        size = share.room.size
        raise Refused(429, f"all requests together have {size} bytes already; ask again later", retry_after=1) from None
    return bytes(body)


async def _own(request: Request, body: bytes, limits: Limits) -> ScoreRequest:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return contract.read_request(contract.loads(body, "the request"), None, limits)
    if kind != "multipart/form-data":
        raise Refused(415, f"Content-Type must be application/json or multipart/form-data, got {kind[:60]!r}")
    fields, files = await _parts(request, body, limits)
    return contract.read_request(contract.loads(fields, "the part 'request'"), files, limits)


async def _parts(request: Request, body: bytes, limits: Limits) -> tuple[bytes, list[bytes]]:
    """Returns the part `request` and the parts `images`, in order, of a multipart body. Raises ContractError."""

    async def stream() -> Any:
        yield body

    parser = MultiPartParser(
        request.headers, stream(), max_files=limits.images, max_fields=4, max_part_size=limits.body_bytes
    )
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        raise ContractError(f"not multipart/form-data of at most {limits.images} images: {error}") from error
    try:
        fields = form.get("request")
        if fields is None or set(form) - {"request", "images"}:
            raise ContractError("the parts are 'request', with JSON, and 'images', a PNG or JPEG file each")
        text = fields.encode() if isinstance(fields, str) else await fields.read()
        files = [b"" if isinstance(file, str) else await file.read() for file in form.getlist("images")]
    finally:
        await form.close()
    return text, files


async def _flow_factory(request: Request, body: bytes, limits: Limits) -> ScoreRequest:
    return flow_factory_request(contract.loads(body, "the request"), limits)


async def _flow_grpo(request: Request, body: bytes, limits: Limits) -> ScoreRequest:
    return flow_grpo_request(body, limits)


def _rewards(reply: ScoreReply) -> bytes:
    return contract.dumps({"rewards": list(reply.scores)})


def _pickled(reply: ScoreReply) -> bytes:
    """Writes `scores` for clients of GenEval and verl-omni, and `outputs` for those of UnifiedReward and DeQA."""
    scores = list(reply.scores)
    return http_pickle.dumps({"scores": scores, "outputs": scores})
