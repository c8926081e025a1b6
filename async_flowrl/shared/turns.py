"""Turns of the two threads of a process that samples and trains: one unit of work at a time, training before tickets.

A ticket is the generation of some images. A unit of training is the forward and backward passes of some groups.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Pause before the next ticket, as a share of the duration of the unit of training before it.  The pause is made if
# another unit is expected, which would otherwise wait for a whole ticket. It is short, because the expected unit may
# never come: another worker may have taken it, or its images may be lost, and then this worker has to generate them
# again.
PATIENCE_SHARE = 0.1
MAX_PATIENCE_SECONDS = 0.25  # Upper limit of that pause, in seconds.


def patience(trained: float) -> float:
    """Returns the pause in seconds after a unit of training that took `trained` seconds, if another is expected."""
    return min(PATIENCE_SHARE * trained, MAX_PATIENCE_SECONDS)


class Turns:
    """Lock of the sampling thread and the training thread of one process, which prefers training.

    No ticket begins while the training thread waits for its turn. A ticket that has begun is not interrupted.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.changed = threading.Condition()
        self.clock = clock
        self._taken = False
        # Number of turns that the training thread has entered and not left, each inside the one before.
        self._depth = 0
        self.waiting = False  # True while the training thread waits for its turn.
        self.waited = 0.0  # Seconds that the training thread has waited for its turns until now, in sum.
        self._trained_since = 0.0
        self._paused_until = 0.0  # End of the pause before the next ticket, by the clock.
        self._sampling_since: float | None = None

    def sampled_for(self) -> float:
        """Returns the seconds since the ticket under way got its turn; 0.0 if no ticket has the turn."""
        began = self._sampling_since
        return 0.0 if began is None else self.clock() - began

    @contextmanager
    def training(self, *, more: bool = False) -> Iterator[None]:
        """Context of a unit of training, which waits at most for the ticket under way; reentrant.

        `more`: another unit is expected at once, so that the next ticket waits for it for a short time.
        """
        with self.changed:
            self._depth += 1
            if self._depth == 1:
                self.waiting, began = True, self.clock()
                self.changed.wait_for(lambda: not self._taken)
                self.waiting, self._taken = False, True
                self._trained_since = self.clock()
                self.waited += self._trained_since - began
        try:
            yield
        finally:
            with self.changed:
                self._depth -= 1
                if self._depth == 0:
                    self._taken = False
                    now = self.clock()
                    self._paused_until = now + patience(now - self._trained_since) if more else 0.0
                    self.changed.notify_all()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Context of a ticket; it waits while a unit of training computes, waits for its turn, or is expected."""
        with self.changed:
            while self._taken or self.waiting or self._pause() > 0:
                self.changed.wait(None if self._taken or self.waiting else self._pause())
            self._taken, self._sampling_since = True, self.clock()
        try:
            yield
        finally:
            with self.changed:
                self._taken, self._sampling_since = False, None
                self.changed.notify_all()

    def _pause(self) -> float:
        return max(0.0, self._paused_until - self.clock())
