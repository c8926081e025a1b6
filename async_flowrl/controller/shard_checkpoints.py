"""Checkpoints of weights that lie in shares on all trainer ranks (tune=full with trainer.shard=full)."""

from collections.abc import Mapping, Sequence
from typing import Any

from separation.group import Worker
from separation.supervise import together

LANE = "save"
"""Lane of a trainer rank for writing checkpoints, which runs beside the next update."""


async def write_shares(
    ranks: Sequence[Worker], directory: str, controller: Mapping[str, Any], keep: int, spare: Sequence[int]
) -> None:
    """Has every rank write its share of the last snapshot, and the first one make the checkpoint of them all.

    Until then nobody reads what is there. Raises WorkerDied, or WorkerFailed as TrainerWorker.save does.
    """
    work = await ranks[0].call("saving.begin", directory, lane=LANE)
    digests = await together(*(rank.call("saving.write", work, lane=LANE) for rank in ranks))
    await ranks[0].call("saving.end", work, controller, digests, keep, spare, lane=LANE)
