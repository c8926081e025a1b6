"""Deaths that show in a call to another worker, which fails because of its dead peer."""

import asyncio
from collections.abc import Sequence

from separation.group import Worker, WorkerDied

DEATH_DETECTION_SECONDS = 2.0
"""Time within which the death of one rank must show after another rank has failed because of it."""


async def dead_among(workers: Sequence[Worker]) -> list[Worker]:
    """Returns those of the workers whose death shows within DEATH_DETECTION_SECONDS; returns as soon as one has."""
    watches = {asyncio.create_task(worker.watch()): worker for worker in workers}
    try:
        done, _ = await asyncio.wait(watches, timeout=DEATH_DETECTION_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        return [watches[task] for task in done if isinstance(task.exception(), WorkerDied)]
    finally:
        for task in watches:
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody else asks for it
            task.cancel()
