"""KeptStates: the newest states of the trainer, held by the controller, from which a run goes on after a rank's death.

A state is what a checkpoint holds. The first rank copies it beside the next step (training/snapshots.py); the
controller fetches the bytes, so that they outlive the rank and its node. Whole weights are too large for that.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from async_flowrl.controller.context import Context
from async_flowrl.training.checkpoint import PackedState
from separation.group import RefLost, Worker, WorkerDied
from separation.supervise import deadline

logger = logging.getLogger(__name__)


MOST = 2  # Number of complete states that are held.
LANE = "keep"  # Lane of the first trainer rank for its kept states, which runs beside the next update.


class DamagedState(RuntimeError):
    """Raised if a state arrives with another digest than it was sent with."""


@dataclass(frozen=True)
class KeptState:
    """The state of a run after so many steps as its version says."""

    version: int
    digest: str
    packed: PackedState
    controller: Mapping[str, Any]  # The controller's part, as in a checkpoint.


@dataclass
class KeptStates:
    """The newest complete states of a run, oldest first, and the one that is being fetched."""

    states: list[KeptState] = field(default_factory=list)
    _fetching: "asyncio.Task[None] | None" = None
    _version: int = -1  # The version that is being fetched, or was last.

    def newest(self) -> KeptState | None:
        """Returns the newest state that still has its digest, or None. Another one is dropped with a warning."""
        while self.states:
            state = self.states[-1]
            if state.packed.digest() == state.digest:
                return state
            logger.warning("the state of version %d is damaged; looking for an older one", state.version)
            self.states.pop()
        return None

    async def keep(self, ctx: Context, rank: Worker, version: int, controller: Callable[[], Mapping[str, Any]]) -> None:
        """Starts to fetch the state of `version`, after the one before it has come.

        `controller` returns the controller's part; it is called when the version is published. Raises the errors of the
        fetch before: WorkerDied, WorkerFailed, DamagedState or DeadlineExceeded.
        """
        if self._fetching is not None:
            await asyncio.shield(self._fetching)  # `settle` may still wait for it where the caller is cancelled.
        self._version = version
        self._fetching = asyncio.create_task(
            self._fetch(ctx, rank, version, controller), name=f"state of version {version}"
        )

    def cancel(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()

    async def settle(self, ctx: Context) -> None:
        """Ends the fetch under way when an attempt ends; a published version is waited for."""
        fetching, self._fetching = self._fetching, None
        if fetching is None:
            return
        if self._version not in ctx.table.published:  # and never will be, because the attempt has ended
            fetching.cancel()
        (error,) = await asyncio.gather(fetching, return_exceptions=True)
        if error is not None:
            logger.info("the state of version %d is not kept: %s", self._version, error)

    async def _fetch(
        self, ctx: Context, rank: Worker, version: int, controller: Callable[[], Mapping[str, Any]]
    ) -> None:
        await ctx.work.until(lambda: version in ctx.table.published)
        async with deadline(ctx.config.deadlines.update, f"update: the state of version {version} from {rank.name}"):
            try:
                digest, packed = await rank.call("kept_state", version, lane=LANE)
            except RefLost as lost:  # The bytes were on the rank's node.
                raise WorkerDied(rank.name, str(lost)) from lost
            packed = await asyncio.to_thread(packed.copied)  # The object store needs the room.
            if (came := await asyncio.to_thread(packed.digest)) != digest:
                raise DamagedState(f"the state of version {version} came with digest {came}, was sent with {digest}")
        self.states = [*self.states, KeptState(version, digest, packed, controller())][-MOST:]
