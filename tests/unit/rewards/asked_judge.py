"""A judge at a scripted server, and what the tests ask it."""

import asyncio
import base64
import io
import json
from typing import Any

import numpy as np
from PIL import Image

from async_flowrl.rewards.vlm_judge import VLMJudge
from async_flowrl.types import Prompt
from tests.support.scripted_judge import Request, ScriptedJudge, completion

PROMPT = Prompt(0, 'a sign that says "Open {target}"', target="Open")
IMAGES = np.arange(4, dtype=np.uint8)[:, None, None, None] * np.full((4, 8, 6, 3), 40, dtype=np.uint8)
FAST = {"model": "tiny", "timeout": 20.0, "deadline": 60.0}


def judge(server: ScriptedJudge, **options: Any) -> VLMJudge:
    return VLMJudge(**{"base_url": server.url, **FAST, **options})


def ask(reward: VLMJudge, images: Any = IMAGES[:1], prompt: Prompt = PROMPT) -> list[dict[str, float | str]]:
    return asyncio.run(reward(images, prompt))


def scores(reward: VLMJudge, images: Any = IMAGES[:1]) -> list[float | str]:
    return [result["score"] for result in ask(reward, images)]


def pixel(request: Request, place: int = 0) -> int:
    """The first byte of the request's image number `place`, decoded as a server would."""
    url = [part for part in request["messages"][-1]["content"] if part["type"] == "image_url"][place]["image_url"][
        "url"
    ]
    content = base64.b64decode(url.removeprefix("data:image/png;base64,"))
    return int(np.asarray(Image.open(io.BytesIO(content)))[0, 0, 0])


def by_pixel(request: Request) -> bytes:
    return completion(json.dumps({"score": pixel(request) / 40}))
