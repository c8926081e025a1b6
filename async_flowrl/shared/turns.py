"""Turns of a process that samples and trains: one unit of work at a time, and training before tickets."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 0.1
"""How long no ticket begins after a unit of training that others are to follow, as a share of that unit's time. No
longer: another worker may have taken what was to follow, or it may have been lost, and this worker must sample it
again."""
MAX_PATIENCE_SECONDS = 0.25
"""Upper limit of that time."""


def patience(trained: float) -> float:
    """Returns the seconds in which no ticket begins after a unit that `trained` for so many, if another follows."""
    return min(PATIENCE * trained, MAX_PATIENCE_SECONDS)


class Turns:
    """For the thread that samples and the thread that trains. No ticket begins where training waits; none is
    interrupted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._changed = threading.Condition()
        self._clock = clock
        self._taken = False
        self._depth = 0
        """How often the thread that trains has entered its turn."""
        self._waiting = False
        """Whether it waits for it."""
        self._trained_since = 0.0
        self._kept_until = 0.0
        self._sampling_since: float | None = None

    def sampled_for(self) -> float:
        """Seconds since the ticket under way got its turn; 0 if there is none, also while one waits for its turn."""
        began = self._sampling_since
        return 0.0 if began is None else self._clock() - began

    @contextmanager
    def training(self, *, more: bool = False) -> Iterator[None]:
        """Waits for the ticket under way at most. May be entered again inside. `more`: another unit follows at once."""
        with self._changed:
            self._depth += 1
            if self._depth == 1:
                self._waiting = True
                self._changed.wait_for(lambda: not self._taken)
                self._waiting, self._taken = False, True
                self._trained_since = self._clock()
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                if self._depth == 0:
                    self._taken = False
                    now = self._clock()
                    self._kept_until = now + patience(now - self._trained_since) if more else 0.0
                    self._changed.notify_all()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Waits while there is anything to train."""
        with self._changed:
            while self._taken or self._waiting or self._kept() > 0:
                self._changed.wait(None if self._taken or self._waiting else self._kept())
            self._taken, self._sampling_since = True, self._clock()
        try:
            yield
        finally:
            with self._changed:
                self._taken, self._sampling_since = False, None
                self._changed.notify_all()

    def _kept(self) -> float:
        return max(0.0, self._kept_until - self._clock())
