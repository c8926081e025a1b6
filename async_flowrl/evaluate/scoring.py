"""Scoring of one prompt's images in an evaluation, with retries as in a run."""

import asyncio
from concurrent.futures import Executor

from async_flowrl.config.schema import RewardConfig
from async_flowrl.controller.context import Servers
from async_flowrl.controller.scoring import without_server
from async_flowrl.rewards.composite import CompositeReward, combined
from async_flowrl.types import ByteArray, Prompt, Scores


async def scored(
    reward: CompositeReward,
    config: RewardConfig,
    servers: Servers,
    executor: Executor,
    prompt: Prompt,
    images: ByteArray,
) -> Scores:
    """Returns the scores of images uint8 [n, H, W, 3] by all terms of `config`.

    A term that fails is tried again up to `reward.retries` times. Raises RewardError if a required term, or every term,
    still has no score.
    """
    parts: list[Scores] = []
    asked = tuple(config.terms)
    for attempt in range(config.retries + 1):
        await servers.up(asked)
        if (gone := without_server(servers, asked)) is not None:
            parts.append(gone)
            asked = tuple(name for name in asked if name not in gone.failed)
            if not asked:
                break
        parts.append(await reward.attempt(prompt, images, executor, only=asked))
        asked = tuple(name for name, failure in parts[-1].failed.items() if not failure.final)
        if not asked or attempt == config.retries:
            break
        await asyncio.sleep(config.backoff * 2**attempt)
    return reward.demanded(combined(config.terms, parts))
