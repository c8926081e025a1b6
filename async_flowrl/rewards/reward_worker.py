"""The reward worker: a plain object in a process or thread of the reward pool, which scores one group per call."""

import asyncio
import threading
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import numpy as np

from async_flowrl.config.schema import RewardConfig, RewardTerm
from async_flowrl.rewards.registry import build_reward
from async_flowrl.rewards.served import Addresses
from async_flowrl.types import ByteArray, Prompt, Scores


class RewardWorker:
    """Builds its rewards once and keeps one event loop, so that async rewards can keep connections open."""

    def __init__(
        self,
        config: RewardConfig,
        index: int,
        name: str,
        *,
        held_out: Mapping[str, RewardTerm] = MappingProxyType({}),
        folder: Path | None = None,
        servers: Mapping[str, Addresses] = MappingProxyType({}),
    ) -> None:
        """`held_out` are terms that score only evaluations; with them, `config` may have no terms.

        `folder` is the run directory, or None. `servers` are the addresses of the servers that the run has started, by
        term.
        """
        self.index, self.name = index, name
        self.reward = build_reward(config, held_out)
        for term in self.reward.terms:
            if folder is not None and hasattr(term.reward, "keep_in"):
                term.reward.keep_in(folder)
        threads = sum(config.concurrency if term.pointwise else 1 for term in self.reward.terms)
        self._executor = ThreadPoolExecutor(max(1, threads), thread_name_prefix=f"{name}-score")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{name}-loop", daemon=True)
        self._thread.start()
        self.connect(servers)

    def connect(self, servers: Mapping[str, Addresses]) -> None:
        self.reward.connect(servers)

    def score(self, terms: Collection[str], prompt: Prompt, *images: ByteArray) -> Scores:
        """Returns the scores of one group by the `terms`, trained or held out; those that fail are in `failed`.

        Each element of `images` holds a ticket's images, uint8 [ticket_size, H, W, 3].
        """
        whole = images[0] if len(images) == 1 else np.concatenate(images)
        scoring = self.reward.attempt(prompt, whole, self._executor, only=terms)
        return asyncio.run_coroutine_threadsafe(scoring, self._loop).result()

    def close(self) -> None:
        """Ends the event loop's thread. A reward that is still running is not waited for."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
