"""Artificial delays (`debug.delays`) for tests: workers finish in another order, and results must stay the same."""

import random
import time

from async_flowrl.config.sections.debug import DelaysConfig
from async_flowrl.seeds import derive


def debug_delay(delays: DelaysConfig, stage: str, seed: int, *moment: int | str) -> None:
    """Sleeps for a time drawn uniformly from 0 to `delays.<stage>` seconds; for all of it with `delays.constant`.

    The draw depends only on `seed` and `moment`, the names of this call.
    """
    seconds: float = getattr(delays, stage)
    if seconds:
        draw = random.Random(derive(seed, "delay", *moment)).random()
        time.sleep(seconds * (1.0 if delays.constant else draw))
