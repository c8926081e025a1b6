"""`debug.delays`: seeded waits that reorder what workers finish, to test that timing changes nothing but time."""

import random
import time

from async_flowrl.config.schema import DelaysConfig
from async_flowrl.seeds import derive


def debug_delay(delays: DelaysConfig, stage: str, seed: int, *moment: int | str) -> None:
    """Sleeps up to `delays.<stage>` seconds, drawn from (seed, moment); exactly as long with `delays.constant`."""
    seconds: float = getattr(delays, stage)
    if seconds:
        draw = random.Random(derive(seed, "delay", *moment)).random()
        time.sleep(seconds * (1.0 if delays.constant else draw))
