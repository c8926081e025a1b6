"""Snapshots copies the state of a trainer rank to host memory, beside the next training step.

The copy is made while the gradients of the next step are computed. What changes the state waits for it (`wait`): the
end of that step, and forward passes that put other weights in place of the trained ones. What is made of the copy
afterwards, bytes for the controller (controller/kept_state.py) or files of a checkpoint, is the business of the caller.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from time import time
from typing import Any

import torch

from async_flowrl.training.checkpoint import Checkpoint
from async_flowrl.training.rank_state import RankState
from async_flowrl.types import Span
from checkpoint_engine.side_stream import SideStream, on, recorded

RETAINED = 2
"""Number of the newest copies that are retained: the one under way, and one whose version may still be asked for."""


class Snapshots:
    """The copies of one rank. `begin` and `wait` belong to the lane that trains, `of` may be called on any lane."""

    def __init__(self, state: RankState, device: torch.device) -> None:
        self._state, self._device = state, device
        self._side = SideStream.of(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._copies: dict[int, Future[Checkpoint]] = {}
        self._under_way: Future[Checkpoint] | None = None

    def begin(self) -> int:
        """Begins to copy the present state, unless it is copied already; returns its version.

        Raises RuntimeError while an optimizer step is under way, because the weights lack the gradients that it has
        added.
        """
        counters = self._state.counters()
        version = int(counters["version"])
        if version not in self._copies:
            made = recorded(self._device)  # The copy must not read what the device has still to write.
            self._under_way = self._copies[version] = self._thread.submit(self._copied, counters, made)
            for old in sorted(self._copies)[:-RETAINED]:
                del self._copies[old]
        return version

    def wait(self) -> tuple[Span, ...]:
        """Waits until nothing is being copied, so that the state may change; returns the time of the wait, if any."""
        under_way, self._under_way = self._under_way, None
        if under_way is None or under_way.done():
            return ()
        began = time()
        under_way.result()
        return (Span("wait_snapshot", began, time()),)

    def of(self, version: int) -> Checkpoint:
        """Returns the copy of a version. Raises KeyError if it was not begun, or if newer ones have replaced it."""
        return self._copies[version].result()

    def forget(self, version: int) -> None:
        """Forgets the copy of a version, where its memory is needed."""
        self._copies.pop(version, None)

    def clear(self) -> None:
        """Forgets all copies, because the state becomes another one."""
        self.wait()
        self._copies.clear()

    def _copied(self, counters: dict[str, Any], made: Any) -> Checkpoint:
        with on(self._side):
            if self._side is not None:
                self._side.wait(made)
            copy = Checkpoint(self._state.tensors(), counters, {})
            if self._side is not None:
                self._side.synchronize()
        return copy
