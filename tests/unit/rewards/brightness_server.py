"""A reward for `serve-rewards`: the brightness, or a fault that the prompt asks for; and how to ask its server."""

import base64
from typing import Any

import httpx
import numpy as np

from async_flowrl.rewards.base import PromptRefused
from async_flowrl.rewards.http import HTTP
from async_flowrl.rewards.http_contract import Limits, encode_image
from async_flowrl.types import ByteArray, Prompt

LIMITS = Limits(body_bytes=100_000, images=4, pixels=64 * 64, all_pixels=3 * 64 * 64)


def brightness(images: ByteArray, prompt: Prompt) -> list[Any]:
    """The mean, and how many images came together."""
    if prompt.text == "fail":
        raise ConnectionError("the model is away")
    if prompt.text == "no":
        raise PromptRefused("such prompts are not scored")
    return [{"score": float(image.mean()), "group": len(images), "prompt": prompt.text} for image in images]


def picture(value: int = 7, width: int = 8) -> ByteArray:
    return np.full((8, width, 3), value, dtype=np.uint8)


def png(value: int = 7, width: int = 8) -> str:
    """Returns such a picture as a request has it."""
    return base64.b64encode(encode_image(picture(value, width), "png")).decode()


def body(**changes: Any) -> dict[str, Any]:
    return {"version": 1, "images": [png()], "prompts": ["a cup"], **changes}


def post(url: str, content: Any = None, **options: Any) -> httpx.Response:
    given = {"json": body() if content is None else content} if not isinstance(content, bytes) else {"content": content}
    with httpx.Client(trust_env=False, timeout=60) as client:
        return client.post(url, **given, **options)


async def results(reward: HTTP, images: ByteArray, prompt: str = "a cup") -> list[Any]:
    return await reward(images, Prompt(0, prompt))
