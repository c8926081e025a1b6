"""Traces of chosen steps with torch.profiler, written as profile/<worker>-step-N….json for https://ui.perfetto.dev.

The setting `profile.steps=[5,6]` chooses the steps.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from async_flowrl.config.schema import Config

logger = logging.getLogger(__name__)

# Held while a trace runs: torch has one profiler per process, which a second trace would end or crash.
ONE_PER_PROCESS = threading.Lock()


class StepProfiler:
    """Profiler of one worker; it does nothing in steps that `profile.steps` does not name."""

    def __init__(self, config: Config, worker: str) -> None:
        self._steps, self._worker = frozenset(config.profile.steps), worker
        self._directory = Path(config.output_dir) / "profile"
        self._running: tuple[profile, Path] | None = None

    def start(self, step: int, what: str = "") -> None:
        # A trace that is still running, because its step failed, is discarded first. While another worker of this
        # process traces, a warning takes the place of the trace.
        self.stop(write=False)
        if step not in self._steps:
            return
        name = f"{self._worker}-step-{step:06d}{what}"
        if not ONE_PER_PROCESS.acquire(blocking=False):
            logger.warning("no trace of %s: another trace runs in this process, and torch allows one", name)
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        tracer = profile(activities=activities)
        try:
            tracer.start()
        except BaseException:
            ONE_PER_PROCESS.release()
            raise
        self._running = tracer, self._directory / f"{name}.json"

    def stop(self, *, write: bool = True) -> None:
        """Ends a running trace and writes it, or discards it if `write` is False."""
        if self._running is None:
            return
        (tracer, path), self._running = self._running, None
        try:
            tracer.stop()
            if write:
                path.parent.mkdir(parents=True, exist_ok=True)
                tracer.export_chrome_trace(str(path))
        finally:
            ONE_PER_PROCESS.release()

    @contextmanager
    def around(self, step: int, what: str = "") -> Iterator[None]:
        """Context manager: traces the block if `step` is chosen; the trace is discarded if the block raises."""
        self.start(step, what)
        try:
            yield
            self.stop()
        finally:
            self.stop(write=False)
