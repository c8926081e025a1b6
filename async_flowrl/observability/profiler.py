"""Traces of chosen steps by torch.profiler: `profile.steps=[5,6]` writes profile/<worker>-step-N….json for Perfetto."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from async_flowrl.config.schema import Config


class StepProfiler:
    """One worker's traces. Costs nothing in steps that were not asked for."""

    def __init__(self, config: Config, worker: str) -> None:
        self._steps, self._worker = frozenset(config.profile.steps), worker
        self._directory = Path(config.output_dir) / "profile"
        self._running: tuple[profile, Path] | None = None

    def start(self, step: int, what: str = "") -> None:
        """Begins a trace if `step` was asked for; one that was never stopped (its update failed) is thrown away."""
        self.stop(write=False)
        if step not in self._steps:
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        tracer = profile(activities=activities)
        tracer.start()
        self._running = tracer, self._directory / f"{self._worker}-step-{step:06d}{what}.json"

    def stop(self, *, write: bool = True) -> None:
        """Ends the trace, if there is one, and writes it or throws it away."""
        if self._running is None:
            return
        (tracer, path), self._running = self._running, None
        tracer.stop()
        if write:
            path.parent.mkdir(parents=True, exist_ok=True)
            tracer.export_chrome_trace(str(path))

    @contextmanager
    def around(self, step: int, what: str = "") -> Iterator[None]:
        """A trace of the block, if `step` was asked for and the block ends well."""
        self.start(step, what)
        try:
            yield
            self.stop()
        finally:
            self.stop(write=False)
