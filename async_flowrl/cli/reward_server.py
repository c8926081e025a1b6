"""A reward server as a program: its command-line arguments, its settings, and serving until a signal ends it.

`async-flowrl serve-rewards` and the servers in examples/reward_servers call `add_arguments` and `serve`.
"""

import argparse
import asyncio
import hmac
import ipaddress
import logging
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from async_flowrl.cli.scorer import PendingRequest, Score, Scorer
from async_flowrl.config.error_text import in_one_line
from async_flowrl.rewards import http_contract as contract
from async_flowrl.rewards.base import PromptRefused
from async_flowrl.rewards.call import call
from async_flowrl.rewards.http_contract import HEALTH, PATH, ContractError, Limits, ScoreRequest
from async_flowrl.types import ConditionImage, Prompt

LOOPBACK = "127.0.0.1"
ALL_BYTES_FACTOR = 4  # Default of --max-all-bytes, as a multiple of --max-bytes.


class ServeError(ValueError):
    """Raised if a server cannot start; the message is one sentence."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for address, token and limits to `parser`."""
    limits = Limits()
    option = parser.add_argument
    option("--host", default=LOOPBACK, help="address to listen at (default: %(default)s)")
    option("--port", type=int, default=8000, help="0: any that is free (default: %(default)s)")
    option("--token-env", metavar="NAME", help="environment variable with the token that clients send")
    option("--token-file", type=Path, metavar="FILE", help="the same from a file")
    option("--max-bytes", type=int, default=limits.body_bytes, help="of a request (default: %(default)s)")
    option(
        "--max-all-bytes",
        type=int,
        help="of all requests together that arrive, wait or are scored; others get 429 (default: 4 times --max-bytes)",
    )
    option("--max-images", type=int, default=limits.images, help="per request (default: %(default)s)")
    option("--max-pixels", type=int, default=limits.pixels, help="of one image (default: %(default)s)")
    option("--max-all-pixels", type=int, default=limits.all_pixels, help="of all (default: %(default)s)")
    option("--warm-up", metavar="PROMPT", help="score a grey image of it before listening: weights are loaded then")
    option("--max-waiting", type=int, default=16, help="requests that may wait (default: %(default)s)")


def settings_of(options: argparse.Namespace) -> tuple[Limits, str | None]:
    """Returns limits and token of the arguments. ServeError for limits below 1, or a public address without a token."""
    if options.max_all_bytes is None:
        options.max_all_bytes = ALL_BYTES_FACTOR * options.max_bytes
    for name in ("max_bytes", "max_images", "max_pixels", "max_all_pixels", "max_waiting"):
        if getattr(options, name) < 1:
            raise ServeError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if options.max_all_bytes < options.max_bytes:
        raise ServeError(
            f"--max-all-bytes {options.max_all_bytes} is less than one request, --max-bytes {options.max_bytes}"
        )
    token = read_token(options.token_env, options.token_file)
    if token is None and not is_loopback(options.host):
        raise ServeError(
            f"--host {options.host} is not this machine alone: others could have images scored here; name a token with "
            f"--token-env or --token-file, or listen at {LOOPBACK}"
        )
    per_request = options.max_bytes, options.max_images, options.max_pixels, options.max_all_pixels
    return Limits(*per_request, options.max_waiting, options.max_all_bytes), token


def read_token(variable: str | None, file: Path | None) -> str | None:
    """Returns the token of an environment variable or a file, or None. ServeError if both are named, or it is empty."""
    if variable is not None and file is not None:
        raise ServeError("--token-env and --token-file exclude each other")
    if variable is None and file is None:
        return None
    try:
        token = file.read_text(encoding="utf-8") if file is not None else os.environ.get(variable or "", "")
    except OSError as error:
        raise ServeError(f"--token-file {file} cannot be read: {error.strerror}") from error
    if not token.strip():
        raise ServeError(f"--token-file {file} is empty" if file else f"--token-env {variable} is not set, or empty")
    return token.strip()


def is_loopback(host: str) -> bool:
    """Returns True if only this machine can reach the address; any host name except localhost counts as reachable."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve(score: Score, options: argparse.Namespace, what: str) -> int:
    """Serves `score` until SIGTERM or Ctrl-C and returns the exit code; `what` names the reward in the start message.

    Raises ServeError if a setting is wrong, the warm-up fails, or the address cannot be listened at.
    """
    limits, token = settings_of(options)
    if options.warm_up is not None:
        warm_up(score, options.warm_up)
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listening = socket.create_server((options.host, options.port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        raise ServeError(f"cannot listen at {options.host} port {options.port}: {error}") from error
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    host = f"[{options.host}]" if ":" in options.host else options.host
    url = f"http://{host}:{listening.getsockname()[1]}"
    sys.stdout.write(f"serving {what} at {url} (POST {PATH}, GET {HEALTH}); Ctrl-C ends it\n")
    sys.stdout.flush()
    config = uvicorn.Config(
        build_app(score, limits, token),
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=4 * limits.waiting + 64,
    )
    with listening, suppress(KeyboardInterrupt):  # uvicorn raises it after the requests under way
        uvicorn.Server(config).run(sockets=[listening])
    return 0


def warm_up(score: Score, prompt: str) -> None:
    """Scores one grey image (or edit), so that the reward loads its weights now. Raises ServeError if that fails."""
    grey = np.full((1, 64, 64, 3), 128, dtype=np.uint8)
    edits = getattr(score, "sources", False)
    asked = Prompt(0, prompt, images=(ConditionImage("", (64, 64), ""),) if edits else ())
    try:
        asyncio.run(call(score, grey, asked, sources=[grey[0]] if edits else None))
    except PromptRefused as error:
        raise ServeError(f"--warm-up {prompt!r}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ServeError(f"--warm-up {prompt!r}: {in_one_line(error)}") from error


logger = logging.getLogger(__name__)

BODY_SECONDS = 60.0  # Seconds within which the whole body of a request must arrive; otherwise the reply is 408.


def build_app(score: Score, limits: Limits, token: str | None = None) -> FastAPI:
    """Returns the application that serves `score` by the contract."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    for kind in (ContractError, HTTPException, Exception):
        app.add_exception_handler(kind, _refused)
    scorer = Scorer(score, limits)

    @app.get(contract.HEALTH)
    async def health() -> dict[str, Any]:
        return {"status": "ok", "version": contract.VERSION}

    @app.post(contract.PATH)
    async def score_request(request: Request) -> Response:
        header = request.headers.get("authorization", "").encode()
        # In constant time, so that response times do not reveal the token.
        if token is not None and not hmac.compare_digest(header, f"Bearer {token}".encode()):
            missing = "the header 'Authorization: Bearer TOKEN' is missing, or names another token"
            raise HTTPException(401, missing, {"WWW-Authenticate": "Bearer"})
        await scorer.forget_gone()
        pending = PendingRequest(request.is_disconnected)
        try:
            pending.request = await _read(request, await _body(request, scorer, pending), limits)
            results = await scorer.reply(pending)
        finally:
            scorer.release(pending)
        return Response(contract.reply_body(results), media_type="application/json")

    return app


async def _refused(request: Request, error: Exception) -> Response:
    headers = None
    if isinstance(error, HTTPException):
        status, sentence, headers = error.status_code, error.detail, error.headers
        if status in (404, 405):  # no such path or method
            sentence += f": there are POST {contract.PATH} and GET {contract.HEALTH}"
    elif isinstance(error, ContractError):
        status, sentence = 413 if isinstance(error, contract.TooMuch) else 400, str(error)
    else:
        status, sentence = 500, f"the server failed: {in_one_line(error)}"
    where = request.client.host if request.client else "?"
    logger.warning("%s %s: %d %s", where, request.url.path, status, sentence)
    fields = {"version": contract.VERSION, "error": sentence}
    return Response(contract.dumps(fields), status, headers, media_type="application/json")


async def _body(request: Request, scorer: Scorer, pending: PendingRequest) -> bytes:
    """Returns the body of a request. Raises HTTPException as soon as it is too long or too slow, or finds no room."""
    limit = scorer.limits.body_bytes
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > limit:
        raise HTTPException(413, f"the request has {announced} bytes, more than {limit}")
    body = bytearray()
    try:
        scorer.reserve(pending, int(announced) if announced.isdecimal() else 0)
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                if len(body) + len(chunk) > limit:
                    raise HTTPException(413, f"the request has more than {limit} bytes")
                scorer.reserve(pending, len(body) + len(chunk))
                body += chunk
    except TimeoutError:
        raise HTTPException(408, f"the request did not arrive within {BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise HTTPException(400, f"the client hung up after {len(body)} bytes of the request") from None
    return bytes(body)


async def _read(request: Request, body: bytes, limits: Limits) -> ScoreRequest:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        return contract.read_request(contract.loads(body, "the request"), None, limits)
    if kind != "multipart/form-data":
        raise HTTPException(415, f"Content-Type must be application/json or multipart/form-data, got {kind[:60]!r}")
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
