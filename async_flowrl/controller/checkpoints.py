"""Checkpoints on the controller's side: when one is due, the controller's part of it, and the choice of one to resume.

training/checkpoint.py describes the files. AfterStep (after_step.py) uses Checkpoints; run/job.py and run/recovery.py
use `find_resume` and the functions below it.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from async_flowrl.config.schema import Config
from async_flowrl.controller.context import Context
from async_flowrl.controller.rank_weights import DISK_ERRORS
from async_flowrl.controller.resume import deciding, device_type, inputs_of, numerics
from async_flowrl.controller.trainer import TrainerGroup
from async_flowrl.observability.run_directory import RunDirectory
from async_flowrl.tickets.request import RequestBuilder
from separation.group import WorkerFailed
from separation.supervise import deadline

logger = logging.getLogger(__name__)

SECONDS_BETWEEN = 300.0  # Time between checkpoints where `save.every` is null.
RETRY_SECONDS = 1.0  # Pause before the writing of the run's last checkpoint is tried again.


class SaveFailed(RuntimeError):
    """Raised if `limits.missed_checkpoints` checkpoints in a row could not be written."""


@dataclass
class Checkpoints:
    """Starts the writing of checkpoints on the first trainer rank, and keeps count of those written."""

    config: Config
    directory: RunDirectory
    trainers: TrainerGroup
    device: str  # Device of the trainer ranks as torch names it, e.g. `cpu` or `cuda:0`.
    requests: RequestBuilder = field(kw_only=True)
    base_digest: str = field(kw_only=True)  # Digest of the base weights that all workers have loaded.
    schedules: str = field(kw_only=True)  # Digest of the noise levels of all image sizes.
    # Returns the versions whose checkpoints must be kept besides the newest checkpoints.
    spare: Callable[[], Sequence[int]] = field(default=lambda: (), kw_only=True)
    misses: int = 0  # Number of checkpoints in a row that could not be written.
    last: float = 0.0  # When the last checkpoint was begun, in the observer's seconds.
    saved: list[int] = field(default_factory=list)  # Versions whose checkpoints are written.
    _writing: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._inputs, self._deciding = inputs_of(self.requests), deciding(self.config)
        self._numerics = numerics(self.config, device_type(self.device))

    async def insist(self, ctx: Context, version: int) -> None:
        """Writes the run's last checkpoint, and tries again, as no later one replaces it. Raises as `save`."""
        await self.written()
        while version not in self.saved:
            await self.save(ctx, version)
            await self.written()
            if version not in self.saved:
                await asyncio.sleep(RETRY_SECONDS)

    async def save(self, ctx: Context, version: int) -> None:
        """Starts the checkpoint of `version` unless it is saved; returns when the trainer's state is copied.

        One checkpoint is written at a time, beside the next updates. Raises the errors of `written`, and
        DeadlineExceeded.
        """
        await self.written()
        if version in self.saved:
            return
        async with deadline(self.config.deadlines.update, f"update: the trainer's copy for checkpoint {version}"):
            await self.trainers.weights.snapshot()
        controller = self.controller_part(ctx, version)()
        self._writing = asyncio.create_task(self._write(version, controller), name=f"checkpoint {version}")

    def overdue(self, now: float) -> bool:
        """Whether a run with `save.every=null` needs a checkpoint at the time `now`, in the observer's seconds."""
        return self.config.save.every is None and self.config.keeps_state and now - self.last >= SECONDS_BETWEEN

    def controller_part(self, ctx: Context, version: int) -> Callable[[], dict[str, Any]]:
        """Returns a function that returns the controller's part; to be called when `version` is published."""
        curriculum = self.requests.curriculum.saved() if self.requests.curriculum else None
        return lambda: {
            "version": version,
            "published": {str(v): digest for v, digest in ctx.table.published.items()},
            "deciding": self._deciding,
            "numerics": self._numerics,
            "inputs": self._inputs,
            "base_digest": self.base_digest,
            "schedules": self.schedules,
            "curriculum": curriculum,
        }

    async def written(self) -> None:
        """Waits for the checkpoint under way.

        Raises SaveFailed after `limits.missed_checkpoints` disk errors in a row, WorkerFailed for other errors,
        WorkerDied, or DeadlineExceeded after `deadlines.update`.
        """
        if self._writing is not None:
            await self._writing
            self._writing = None

    async def check(self) -> None:
        if self._writing is not None and self._writing.done():
            await self.written()

    def abandon(self) -> None:
        """Stops waiting for the checkpoint that is being written; an incomplete one is ignored when a run resumes."""
        if self._writing is not None and not self._writing.cancel() and not self._writing.cancelled():
            self._writing.exception()  # Marks the error as seen: the attempt has already ended for another reason.

    async def _write(self, version: int, controller: dict[str, Any]) -> None:
        directory, spare = str(self.directory.checkpoints), self.spare()
        try:
            async with deadline(self.config.deadlines.update, f"update: writing checkpoint {version}"):
                await self.trainers.weights.save(version, directory, controller, self.config.save.keep, spare)
        except WorkerFailed as error:
            if error.kind not in DISK_ERRORS:
                raise
            self.misses += 1
            logger.warning("checkpoint %d could not be written (%d in a row): %s", version, self.misses, error.message)
            if self.misses >= self.config.limits.missed_checkpoints:
                raise SaveFailed(f"{self.misses} checkpoints in a row could not be written: {error.message}") from error
        else:
            self.misses = 0
            self.saved.append(version)
