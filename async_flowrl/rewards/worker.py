"""The reward worker: a plain object of the reward pool that scores one group per call."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from async_flowrl.config.schema import DelaysConfig, RewardConfig
from async_flowrl.observability.delays import debug_delay
from async_flowrl.rewards.registry import build_reward
from async_flowrl.types import ByteArray, Prompt, Scores


class RewardWorker:
    """Builds its own rewards and keeps one event loop, so that async rewards may keep connections open."""

    def __init__(
        self, config: RewardConfig, index: int, name: str, *, delays: DelaysConfig | None = None, seed: int = 0
    ) -> None:
        self.index, self.name = index, name
        self.reward = build_reward(config)
        self._delays, self._seed = delays or DelaysConfig(), seed
        self._calls = 0
        self._executor = ThreadPoolExecutor(len(self.reward.terms), thread_name_prefix=f"{name}-score")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{name}-loop", daemon=True)
        self._thread.start()

    def score(self, prompt: Prompt, *images: ByteArray) -> Scores:
        """Scores of one group from its tickets' images uint8 [ticket_size, H, W, 3], in order. Raises RewardError."""
        group = images[0] if len(images) == 1 else np.concatenate(images)
        scoring = self.reward.score(prompt, group, self._executor)
        scores = asyncio.run_coroutine_threadsafe(scoring, self._loop).result()
        debug_delay(self._delays, "score", self._seed, self.name, self._calls)
        self._calls += 1
        return scores

    def close(self) -> None:
        """Ends the event loop's thread; a reward that is still running is left behind."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
