"""`until` waits in the thread of a test for what another thread does."""

import threading
from collections.abc import Callable

SECONDS = 120.0
"""Limit of the wait: far more than a busy machine needs."""
PAUSE_SECONDS = 0.01


def until(condition: Callable[[], object]) -> None:
    """Returns as soon as the condition holds. Raises AssertionError if it never does."""
    for _ in range(int(SECONDS / PAUSE_SECONDS)):
        if condition():
            return
        threading.Event().wait(PAUSE_SECONDS)
    raise AssertionError("it never came to that")
