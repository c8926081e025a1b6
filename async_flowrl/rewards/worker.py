"""One member of the reward pool: a plain object that scores one group per call."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from async_flowrl.config import RewardConfig
from async_flowrl.rewards.registry import build_reward
from async_flowrl.types import ByteArray, Prompt, Scores


class RewardWorker:
    """Builds its own rewards. It keeps one event loop for its life, so that async rewards may keep connections open."""

    def __init__(self, config: RewardConfig, index: int, name: str) -> None:
        self.index, self.name = index, name
        self.reward = build_reward(config)
        self._executor = ThreadPoolExecutor(len(self.reward.terms), thread_name_prefix=f"{name}-score")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{name}-loop", daemon=True)
        self._thread.start()

    def score(self, prompt: Prompt, *images: ByteArray) -> Scores:
        """Scores of one group from its tickets' images uint8 [ticket_size, H, W, 3], in order. Raises RewardError."""
        group = images[0] if len(images) == 1 else np.concatenate(images)
        return asyncio.run_coroutine_threadsafe(self.reward.score(prompt, group, self._executor), self._loop).result()

    def close(self) -> None:
        """Ends the threads; idle ones would not keep the process alive either."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
