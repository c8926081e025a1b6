"""Trained weights on the trainer ranks: all of them on each rank, or some rows of every tensor.

TrainerGroup has one of the two objects, which sends weights and writes checkpoints.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from async_flowrl.config.check import ConfigError
from async_flowrl.config.schema import Config
from async_flowrl.controller.endpoints import GatheredEndpoint, TrainerEndpoint
from async_flowrl.types import POLICY
from checkpoint_engine import Header
from checkpoint_engine.transports import resolve_transport
from separation.group import Worker, WorkerFailed, WorkerGroup
from separation.supervise import together

LANE = "save"  # Lane of a trainer rank for writing checkpoints, which runs beside the next update.
# Names of the exceptions that mean that a file could not be written; any other exception of a writer ends the run.
DISK_ERRORS = {"OSError", "PermissionError", "FileNotFoundError", "BlockingIOError", "SafetensorError"}
OnSealed = Callable[[Header], None]


class ReplicatedWeights:
    """Each rank has all of the trained weights: the first one sends them and writes the checkpoints."""

    by_group = False  # As `World.by_group`.

    def __init__(self, pool: WorkerGroup) -> None:
        self._pool = pool
        # Context of every call in which the ranks train.
        self.training: AbstractAsyncContextManager[Any] = nullcontext()

    @property
    def ranks(self) -> Sequence[Worker]:
        return self._pool.workers

    def sender(self, config: Config, on_sealed: OnSealed, stream: str = POLICY) -> TrainerEndpoint:
        return TrainerEndpoint(self.ranks[:1], config, on_sealed, stream=stream)

    def transport(self, config: Config, chosen: str) -> str:
        """Returns the transport that a run takes that has chosen this one by its devices. Raises ConfigError."""
        return chosen

    async def snapshot(self) -> None:
        await self.ranks[0].call("snapshot")

    async def save(
        self, version: int, directory: str, controller: Mapping[str, Any], keep: int, spare: Sequence[int]
    ) -> None:
        """Has the snapshot of `version` written. Raises WorkerFailed as TrainerWorker.save does."""
        await self.ranks[0].call("save", version, directory, controller, spare, lane=LANE)

    async def verify(self, path: str) -> None:
        """Has the ranks verify what they do not verify while they restore. Raises WorkerFailed for damage."""


class ShardedWeights(ReplicatedWeights):
    """Each rank has some rows of every tensor (tune=full with trainer.shard=full)."""

    by_group = True

    def __init__(self, pool: WorkerGroup) -> None:
        super().__init__(pool)
        self.training = self._training = asyncio.Lock()
        self._gathering = asyncio.Lock()

    def sender(self, config: Config, on_sealed: OnSealed, stream: str = POLICY) -> TrainerEndpoint:
        return GatheredEndpoint(
            self.ranks, config, on_sealed, stream, training=self._training, gathering=self._gathering
        )

    def transport(self, config: Config, chosen: str) -> str:
        """The first rank sends from host memory, which NCCL cannot."""
        try:
            return resolve_transport(config.checkpoint_engine.transport, "cpu")
        except ValueError as error:
            raise ConfigError(f"checkpoint_engine.transport, with trainer.shard=full and tune=full: {error}") from error

    async def snapshot(self) -> None:
        await self._all("snapshot")

    async def save(
        self, version: int, directory: str, controller: Mapping[str, Any], keep: int, spare: Sequence[int]
    ) -> None:
        """Has every rank write its share, and the first one make the checkpoint of them all; nothing is read before.

        Raises WorkerDied or WorkerFailed; after one of DISK_ERRORS all ranks have dropped their copies and the run goes
        on.
        """
        first = self.ranks[0]
        try:
            work = await first.call("saving.begin", directory, lane=LANE)
            written = await self._all("saving.write", work, lane=LANE)
            await first.call("saving.end", work, controller, written, keep, spare, lane=LANE)
        except WorkerFailed as error:
            if error.kind in DISK_ERRORS:
                await self._all("forget_snapshot", lane=LANE)
            raise

    async def verify(self, path: str) -> None:
        await self._all("saving.verify", path)

    async def _all(self, method: str, *arguments: Any, lane: str = "main") -> list[Any]:
        return await together(*(rank.call(method, *arguments, lane=lane) for rank in self.ranks))
