"""Training lane of `placement=shared`: chooses the CUDA stream for each piece of the training thread's work.

A ticket is the generation of some images. A unit of training is the forward and backward passes of some groups. Both
run on the default stream, one after the other, so that both can use the same memory for their activations. All other
work of the training thread runs on a CUDA stream of its own: the sum over the ranks, the optimizer step and the staging
of a version. So it does not wait for the kernels that the ticket under way has queued.
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
    """Streams of the training thread; only that thread may use this object.

    The thread's work is executed in the order in which it was queued, also across the two streams. On a CPU there are
    no streams, and only the turns matter.
    """

    def __init__(self, turns: Turns, device: torch.device) -> None:
        self._turns, self._device = turns, device
        self._side = SideStream.of(device)
        self._depth = 0
        """Number of turns that were entered and not left, each inside the one before."""

    @property
    def waited(self) -> float:
        """Seconds that the training thread has waited for its turns until now, in sum."""
        return self._turns.waited

    @contextmanager
    def turn(self, *, more: bool = False) -> Iterator[None]:
        """Context of a unit of training, which begins after the ticket under way. It may be entered again inside.

        `more` has the meaning that it has in `Turns.training`.
        """
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
        """Context of work that takes no turn and runs beside a ticket.

        When the context ends, the device has finished this work, so that other threads may use the results. Inside a
        turn the context does nothing, and the work belongs to the turn.
        """
        if self._side is None or self._depth:
            yield
            return
        with self._side.current():
            yield
        self._side.synchronize()
