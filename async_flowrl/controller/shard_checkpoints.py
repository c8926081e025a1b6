"""Checkpoints of weights that lie in shares on all trainer ranks (tune=full with trainer.shard=full)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_flowrl.config.check import ConfigError
from async_flowrl.config.schema import Config
from async_flowrl.config.sections.tune import FULL
from async_flowrl.training.checkpoint import check_ranks
from async_flowrl.training.checkpoint_manifest import TRAINER
from separation.group import Worker, WorkerFailed
from separation.supervise import together

DISK_ERRORS = {"OSError", "PermissionError", "FileNotFoundError", "BlockingIOError", "SafetensorError"}
"""Names of the exceptions that mean that a file could not be written; any other exception of a writer ends the run."""
LANE = "save"
"""Lane of a trainer rank for writing checkpoints, which runs beside the next update."""


async def write_shares(
    ranks: Sequence[Worker], directory: str, controller: Mapping[str, Any], keep: int, spare: Sequence[int]
) -> None:
    """Has every rank write its share of the last snapshot, and the first one make the checkpoint of them all.

    Until then nobody reads what is there. Raises WorkerDied, or WorkerFailed as TrainerWorker.save does; for one of
    DISK_ERRORS, with which the run goes on, all ranks have dropped their copies.
    """
    try:
        work = await ranks[0].call("saving.begin", directory, lane=LANE)
        written = await together(*(rank.call("saving.write", work, lane=LANE) for rank in ranks))
        await ranks[0].call("saving.end", work, controller, written, keep, spare, lane=LANE)
    except WorkerFailed as error:
        if error.kind in DISK_ERRORS:
            await together(*(rank.call("forget_snapshot", lane=LANE) for rank in ranks))
        raise


def check_shares(config: Config, path: Path) -> None:
    """Raises ConfigError, one sentence, if the ranks that wrote a checkpoint shared the weights in another way.

    With `trainer.shard=auto` it is not known yet how the ranks of this run will; they look themselves.
    """
    trainer = config.trainer
    if config.tune != FULL or (trainer.shard == "auto" and trainer.num_workers > 1):
        return
    ranks = trainer.num_workers if trainer.shard == "full" and trainer.num_workers > 1 else None
    try:
        check_ranks(path, json.loads((path / TRAINER).read_text()), ranks)
    except ValueError as error:
        raise ConfigError(str(error)) from error
