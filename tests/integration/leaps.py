"""A clock for runs whose workers are threads: an injected delay sets it forward at once, instead of waiting.

A delay may then be so long that nothing a busy machine does to the real work can be taken for it.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

from async_flowrl.observability import delays
from async_flowrl.run import job

PATIENT = tuple(f"deadlines.{call}=.inf" for call in ("generate", "score", "publish", "update", "stall"))
"""Settings of a run on this clock: to it, a call takes as long as all delays meanwhile."""


@contextmanager
def leaping_clock() -> Iterator[None]:
    """All that reads the time, the event loop included, reads it with the delays (`debug.delays`) until then."""
    real_time, real_monotonic = time.time, time.monotonic
    lock, leapt = threading.Lock(), 0.0

    def leap(seconds: float) -> None:
        nonlocal leapt
        with lock:
            leapt += seconds

    def wall() -> float:
        return real_time() + leapt

    def monotonic() -> float:
        return real_monotonic() + leapt

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(time, "time", wall))
        stack.enter_context(mock.patch.object(time, "monotonic", monotonic))
        stack.enter_context(mock.patch.object(delays, "time", SimpleNamespace(sleep=leap)))
        defaults = job.open_ledgers.__kwdefaults__
        assert defaults is not None
        stack.enter_context(mock.patch.dict(defaults, {"clock": monotonic}))
        yield
