"""The HTTP application of a reward server: checks of token and sizes, scoring in turn, and error replies.

`server.py` runs it with uvicorn; docs/rewards/http.md describes requests and replies.
"""

import asyncio
import hmac
import logging
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from async_flowrl.config.messages import in_one_line
from async_flowrl.rewards import http_contract as contract
from async_flowrl.rewards.http_contract import ContractError, Limits, ScoreRequest
from async_flowrl.serve_rewards.scorer import Asked, Full, Refused, Score, Scorer, Settings, Share

logger = logging.getLogger(__name__)

BODY_SECONDS = 60.0
"""Seconds within which the whole body of a request must arrive; otherwise the reply is 408."""


def build_app(score: Score, settings: Settings) -> FastAPI:
    """Returns the application that serves `score` by the contract."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    for kind in (Refused, ContractError, HTTPException, Exception):
        app.add_exception_handler(kind, _refused)
    scorer = Scorer(score, settings)

    @app.get(contract.HEALTH)
    async def health() -> dict[str, Any]:
        return {"status": "ok", "version": contract.VERSION}

    @app.post(contract.PATH)
    async def own(request: Request) -> Response:
        return await _answer(request, scorer, settings)

    return app


async def _answer(request: Request, scorer: Scorer, settings: Settings) -> Response:
    """Answers one request: checks the token, then the sizes, then the content, and then scores it."""
    _check_token(request, settings.token)
    await scorer.forget_gone()
    share = Share(scorer.room)
    try:
        body = await _body(request, settings.limits.body_bytes, share)
        asked = Asked(await _read(request, body, settings.limits), request.is_disconnected, share)
        del body  # what is reserved for it is given back as soon as `asked` is released
    except BaseException:
        share.close()
        raise
    return Response(contract.reply_body(await scorer.reply(asked)), media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    """Answers any error in the contract's form."""
    headers = dict[str, str]()
    if isinstance(error, HTTPException):  # no such path or method
        headers |= error.headers or {}
        told = f"{error.detail}: there are POST {contract.PATH} and GET {contract.HEALTH}"
        error = Refused(error.status_code, told)
    elif isinstance(error, ContractError):
        error = Refused(413 if isinstance(error, contract.TooMuch) else 400, str(error))
    elif not isinstance(error, Refused):
        error = Refused(500, f"the server failed: {in_one_line(error)}")
    logger.warning("%s %s: %d %s", request.client.host if request.client else "?", request.url.path,
                   error.status, error)  # fmt: skip
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    fields = {"version": contract.VERSION, "error": str(error)}
    return Response(contract.dumps(fields), error.status, headers, media_type="application/json")


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


async def _read(request: Request, body: bytes, limits: Limits) -> ScoreRequest:
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
