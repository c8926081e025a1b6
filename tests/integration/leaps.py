"""A clock for runs whose workers are threads: injected time sets it forward at once, instead of waiting.

That time may then be so long that nothing a busy machine does to the real work can be taken for it.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.run import job
from async_flowrl.training import forward_passes
from async_flowrl.training.update import Update
from benchmarks import disturbed

PATIENT = tuple(f"deadlines.{call}=inf" for call in ("generate", "score", "publish", "update", "stall"))
"""Settings of a run on this clock: to it, a call takes as long as all delays meanwhile."""


@contextmanager
def leaping_clock(*, generate: float = 0.0, update: float = 0.0) -> Iterator[None]:
    """All that reads the time, the event loop included, reads it with the delays (benchmarks/disturbed.py) until then.

    `generate` is the seconds that denoising a ticket takes by this clock, and `update` those of an optimizer step; a
    delay comes after that work and is no part of its span.
    """
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

    denoise, step_from = DiffusersEngine.denoise, Update.step_from

    def denoising(*call: Any) -> Any:
        result = denoise(*call)
        leap(generate)
        return result

    def stepping(*call: Any) -> Any:
        result = step_from(*call)
        leap(update)
        return result

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(DiffusersEngine, "denoise", denoising))
        stack.enter_context(mock.patch.object(Update, "step_from", stepping))
        stack.enter_context(mock.patch.object(time, "time", wall))
        stack.enter_context(mock.patch.object(forward_passes, "time", wall))
        stack.enter_context(mock.patch.object(time, "monotonic", monotonic))
        stack.enter_context(mock.patch.object(disturbed, "time", SimpleNamespace(sleep=leap)))
        defaults = job.open_ledgers.__kwdefaults__
        assert defaults is not None
        stack.enter_context(mock.patch.dict(defaults, {"clock": monotonic}))
        yield
