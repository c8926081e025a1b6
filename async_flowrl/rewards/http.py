"""The reward `http`: scores from `async-flowrl serve-rewards`, or from another server of the same contract.

docs/rewards/http.md has the contract, the options, and what happens if a server is slow, wrong or unreachable.
"""

import asyncio
import functools
import hashlib
import math
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx
import numpy as np
from PIL import Image

from async_flowrl.config.error_text import unknown_name
from async_flowrl.config.resolution import spaced_frames
from async_flowrl.rewards import http_contract as contract
from async_flowrl.rewards.endpoint import LIMITS, Endpoint, check_numbers, checked_urls
from async_flowrl.rewards.image_statistics import EDIT_BOX
from async_flowrl.types import ByteArray, Prompt, Requests

GROUP, ONE_BY_ONE = "group", "one_by_one"
PNG, MULTIPART = "png", "multipart"


@dataclass(eq=False)
class HTTP:
    """Sends the images of a group to a server and returns its scores; docs/rewards/http.md explains the options.

    `url` is one URL or several, over which groups are spread; None where the term has `serve`.
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
    video: bool = False
    sources: bool = False
    frames: int | None = 16
    max_images: int = contract.Limits.images

    # Option that is required unless the term has `serve`, and an example of its value.
    wants_server: ClassVar[tuple[str, str]] = ("url", "http://127.0.0.1:8000")

    def __post_init__(self) -> None:
        if self.batch not in (GROUP, ONE_BY_ONE):
            raise ValueError(unknown_name("the http reward's batch", str(self.batch), (GROUP, ONE_BY_ONE)))
        if self.encoding not in (encodings := (*contract.FORMATS, MULTIPART)):
            raise ValueError(unknown_name("the http reward's encoding", str(self.encoding), encodings))
        numbers = (("max_reply_bytes", 1, math.inf), ("max_images", 1, math.inf), ("frames", 1, math.inf))
        given = {name: value for name, value in vars(self).items() if value is not None}
        check_numbers("http", {"frames": 1, **given}, (*LIMITS, *numbers))
        self._endpoint = Endpoint(_endpoints(self.url), vars(self), reply_bytes=self.max_reply_bytes, token="token_env")

    def check(self, prompt: Prompt) -> None:
        """Raises ValueError if JSON cannot hold the prompt's metadata, or if a needed target is missing."""
        if self.needs_target and not prompt.target:
            raise ValueError(f"needs_target=true, and prompt {prompt.text!r:.80} has none in double quotes or a column")
        contract.prompt_fields(prompt)
        first = math.prod(prompt.images[0].size) if self.sources and prompt.images else 0
        if first > contract.Limits.pixels and prompt.metadata.get(EDIT_BOX) is not None:
            why = f"is sent with {contract.Limits.pixels} of its {first} pixels, which its {EDIT_BOX} would not fit"
            raise ValueError(f"the first image of prompt {prompt.text!r:.80} {why}: reduce it in the data")

    def check_group(self, images: int, frames: int, sources: int = 0) -> None:
        """Raises ValueError if a request would have more images, frames and sources together than `max_images`."""
        sent = self._frames(frames) * (images if self.batch == GROUP else 1) + sources
        if sent > self.max_images:
            raise ValueError(
                f"a request would have {sent} images, and max_images={self.max_images} is what serve-rewards takes at "
                "once: set fewer frames (reward.frames; with video=true the option frames), or batch=one_by_one, or "
                "max_images as the server's --max-images"
            )

    def _frames(self, frames: int) -> int:
        return min(frames, self.frames or frames) if self.video else frames

    def counted(self) -> Requests:
        return self._endpoint.counted()

    def connect(self, urls: Sequence[str], token: str | None) -> None:
        self._endpoint.connect(_endpoints(urls), token)

    def __call__(
        self, images: ByteArray, prompt: Prompt, sources: Sequence[ByteArray] = ()
    ) -> Coroutine[Any, Any, list[Any]]:
        """Encodes images uint8 [n, H, W, 3] in the caller's thread and returns a coroutine that fetches their scores.

        With `video` they are videos [n, F, H, W, 3]. Sources are reduced to what `serve-rewards` takes by default. The
        coroutine raises ServerError if no server is known, or if a request fails.
        """
        kind = PNG if self.encoding == MULTIPART else self.encoding
        frames = self._frames(images.shape[1]) if self.video else None
        videos = images[:, None] if frames is None else images[:, spaced_frames(images.shape[1], frames)]
        files = [[contract.encode_image(image, kind) for image in video] for video in videos]
        parts = [files] if self.batch == GROUP else [[video] for video in files]
        edited = [contract.encode_image(_reduced(source), kind) for source in sources]
        requests, fields = [], [contract.prompt_fields(prompt) | ({"sources": len(edited)} if edited else {})]
        for part in parts:
            flat = [file for video in part for file in video] + edited
            if self.encoding == MULTIPART:
                requests.append(multipart(flat, fields, kind, frames))
            else:
                requests.append((contract.request_body(flat, fields, frames), "application/json"))
        return self._scores(requests, [len(part) for part in parts], first=prompt.index)

    async def _scores(self, requests: Sequence[tuple[bytes, str]], counts: Sequence[int], *, first: int) -> list[Any]:
        """Returns one result per image, in order. The first failure is raised after all requests have ended."""
        calls = (
            self._endpoint.post(body, kind, first + index, functools.partial(contract.read_reply, count=count))
            for index, ((body, kind), count) in enumerate(zip(requests, counts, strict=True))
        )
        replies = await asyncio.gather(*calls, return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
        return [result for reply in replies if isinstance(reply, list) for result in reply]


def multipart(
    files: Sequence[bytes], prompts: Sequence[Mapping[str, Any]], kind: str, frames: int | None = None
) -> tuple[bytes, str]:
    """Returns the contract's request as multipart/form-data (RFC 7578): body and content type."""
    fields = contract.dumps(contract.request_fields(prompts, frames))
    images = [("images", (f"{index}.{kind}", file, f"image/{kind}")) for index, file in enumerate(files)]
    # The boundary follows from the images, so that equal requests have equal bytes.
    kind_of_body = f"multipart/form-data; boundary={hashlib.sha256(b''.join(files)).hexdigest()}"
    parts = [("request", (None, fields, "application/json")), *images]
    return httpx.Request("POST", "", files=parts, headers={"Content-Type": kind_of_body}).read(), kind_of_body


def _reduced(source: ByteArray) -> ByteArray:
    """Returns a source uint8 [H, W, 3] in its shape, with at most the pixels of `Limits`."""
    height, width = source.shape[:2]
    scale = math.sqrt(contract.Limits.pixels / (height * width))
    if scale >= 1:
        return source
    size = math.floor(scale * width), math.floor(scale * height)
    return np.asarray(Image.fromarray(source).resize(size, Image.Resampling.LANCZOS))


def _endpoints(option: str | Sequence[str] | None) -> list[str]:
    urls = checked_urls("the http reward's url", option, "http://127.0.0.1:8000", "token_env")
    return [url if urlsplit(url).path.strip("/") else url + contract.PATH for url in urls]
