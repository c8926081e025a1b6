"""Errors of a trainer rank that is asked for weights: it dies, fails or is late.

A rollout worker that waits for the weights is not to blame for any of them and must not be replaced.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from checkpoint_engine import VersionGone
from separation.group import WorkerDied, WorkerFailed
from separation.supervise import limited


class SenderLost(WorkerDied):
    """Raised if weights cannot be had because the trainer rank that sends them has died. `worker` is the rank."""

    kind = "SenderLost"
    """By this name checkpoint_engine judges it, as an error that it cannot cure."""


class SenderFailed(WorkerFailed):
    """Raised if a trainer rank raised an exception when it was asked for weights. `worker` is the rank.

    `exception` is the name of the exception's class. `kind` is another one, by which checkpoint_engine judges it: as an
    error that it cannot cure, whatever the exception was, except that a receiver can go on without a dropped version.
    """

    def __init__(self, worker: str, method: str, kind: str, message: str, remote_traceback: str) -> None:
        super().__init__(worker, method, kind, message, remote_traceback)
        self.exception = kind
        self.kind = kind if kind == VersionGone.__name__ else "SenderFailed"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.worker, self.method, self.exception, self.message, self.remote_traceback)


class SenderLate(RuntimeError):
    """Raised if trainer ranks live and do not answer in time.

    `workers` are the names of all ranks that were asked and have not answered. In a method in which the ranks wait for
    each other, as in the canary's probe, these may be all, of which one hangs.
    """

    def __init__(self, workers: Sequence[str], method: str, seconds: float) -> None:
        late = f"{', '.join(workers)} {'has' if len(workers) == 1 else 'have'}"
        super().__init__(f"publish: {late} not answered {method} within the deadline of {seconds:g} s")
        self.workers, self.method, self.seconds = tuple(workers), method, seconds


@asynccontextmanager
async def answers_of(waiting: Sequence[str], method: str, seconds: float) -> AsyncIterator[None]:
    """Raises SenderLate if the body, which waits for answers of ranks to calls of `method`, takes too long.

    `waiting` are the names of these ranks; the body may take out those that have answered. Raises SenderLost or
    SenderFailed in place of a WorkerDied or WorkerFailed of the body.
    """
    try:
        async with limited(seconds, lambda: SenderLate(waiting, method, seconds)):
            yield
    except WorkerDied as error:
        raise SenderLost(error.worker, error.reason) from error
    except WorkerFailed as error:
        raise SenderFailed(error.worker, error.method, error.kind, error.message, error.remote_traceback) from error
