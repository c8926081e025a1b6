"""Turns of a process that samples and trains: one unit of work at a time, and training before tickets."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_SECONDS = 0.25
"""How long no ticket begins after a unit of training that others are to follow. No longer: what they are about may have
been lost meanwhile, and have to be sampled again, perhaps by this very worker."""


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
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                if self._depth == 0:
                    self._taken = False
                    self._kept_until = self._clock() + PATIENCE_SECONDS if more else 0.0
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
