"""The training thread of a process that samples, too, on a GPU: where its work is queued.

Units of training, which take turns with tickets, are on the default stream, as tickets are: one of them uses the memory
of activations after the other. Everything else of the training thread is on a CUDA stream of its own, so that neither
the sum over the ranks, nor the optimizer step, nor staging a version waits for what was queued of the ticket under way.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from async_flowrl.shared.turns import Turns
from checkpoint_engine.side_stream import SideStream, recorded

cuda: Any = torch.cuda
"""torch.cuda as Any, because its stream classes have no types."""


class TrainingLane:
    """For one thread. All of its work is in order, whichever of the two streams it is on. On a CPU there are none."""

    def __init__(self, turns: Turns, device: torch.device) -> None:
        self._turns, self._device = turns, device
        self._side = SideStream.of(device)
        self._depth = 0
        """How many turns have been entered, one inside the other."""

    @contextmanager
    def turn(self, *, more: bool = False) -> Iterator[None]:
        """A unit of training, which waits for the ticket under way. May be entered again inside; `more` as of Turns."""
        with self._turns.training(more=more):
            if self._side is None:
                yield
                return
            default = cuda.default_stream(self._device)
            default.wait_event(self._side.record())
            self._depth += 1
            try:
                with cuda.stream(default):
                    yield
            finally:
                self._depth -= 1
                with cuda.stream(default):
                    self._side.wait(recorded(self._device))

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What takes no turn. At its end the device has done it, so that any other thread may use what it has made.

        Inside a turn it is a part of that.
        """
        if self._side is None or self._depth:
            yield
            return
        with self._side.current():
            yield
        self._side.synchronize()
