"""Runs one variant by the normal command line and reads its steady state from the run directory."""

import json
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median_high

import psutil

from async_flowrl.benchmark.variants import NOTHING_BUT_TRAINING, Variant
from async_flowrl.observability.events import Event
from async_flowrl.observability.summary import WARM_UP_STEPS
from async_flowrl.plan.measured import actual, delivery_times, generation_seconds, load
from async_flowrl.tickets.table import TRAIN

POLL_SECONDS = 0.25
"""Seconds between two readings of the CPU clock."""


class RunFailed(RuntimeError):
    """A variant's run was too short or failed; after a failure the message has the end of its output."""


@dataclass(frozen=True)
class Measured:
    """Steady state of one run: the steps after the warm-up, without the last ones, which have nothing left to generate.

    `busy` is the busy share of each pool, 0..1; `staleness_mean` is over the whole run.
    """

    variant: str
    step_seconds: float
    images_per_s: float
    busy: Mapping[str, float]
    staleness_mean: float
    generation: float
    """Seconds per step of all tickets, from dispatch to result, summed over the rollout workers."""
    update: float
    """Seconds of an update, without waiting for images."""
    publish: float
    """Median seconds from staging a version (copying it for sending) until a worker holds it."""
    trainer_stall: float
    """Seconds per published version (one per step) that the trainer waits for staging."""
    worker_stall: float
    """Seconds per step that one rollout worker spends on activating versions (loading them into the network)."""
    controller_cpu: float
    """CPU seconds of the controller's process divided by wall-clock seconds."""
    weights_digest: str


def run(variant: Variant, name: str, overrides: Sequence[str], directory: Path) -> Measured:
    """Makes one run in a new process. Raises RunFailed if it fails or is too short."""
    command = [sys.executable, "-m", "async_flowrl.main", "--config-name", variant.mode]
    given = [f"output_dir={directory}", *NOTHING_BUT_TRAINING, *overrides, *variant.overrides]
    with subprocess.Popen([*command, *given], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        watch = CpuWatch(process.pid)
        try:
            output, _ = process.communicate()
        finally:
            watch.stop()
            if process.poll() is None:
                process.terminate()
    if process.returncode != 0:
        raise RunFailed(f"{name} ended with code {process.returncode}:\n{output[-2000:]}")
    return read(variant.name, directory, watch)


def read(name: str, directory: Path, watch: "CpuWatch") -> Measured:
    """Reads a finished run. Raises RunFailed if it has too few steps."""
    config, _, history, metrics = load(directory)
    steady = actual(directory)
    if steady is None:
        raise RunFailed(f"{name} has no steady state: it needs more than {WARM_UP_STEPS + config.max_staleness} steps")
    stop = config.total_steps - config.max_staleness
    lines = [line for line in metrics if WARM_UP_STEPS <= line["step"] < stop]
    steps = {event["step"]: event for event in history if event["event"] == "step"}
    window = steps[WARM_UP_STEPS]["started"], steps[stop - 1]["ended"]
    summary = json.loads((directory / "summary.json").read_text())
    tickets, activations = worker_seconds(history, range(WARM_UP_STEPS, stop))
    made = config.prompts_per_step * config.group_size
    return Measured(
        variant=name,
        step_seconds=steady.step_seconds,
        images_per_s=made / steady.step_seconds,
        busy=steady.busy,
        staleness_mean=summary["staleness_mean"],
        generation=tickets / len(lines),
        update=fmean(line["timing/update"] for line in lines),
        publish=median_high(delivery_times(history) or [0.0]),
        trainer_stall=summary["sync"]["trainer_stall_seconds"] / max(1, summary["sync"]["publishes"]),
        worker_stall=activations / len(lines) / config.rollout.num_workers,
        controller_cpu=watch.share(*window),
        weights_digest=summary["weights_digest"],
    )


def worker_seconds(history: Sequence[Event], steps: range) -> tuple[float, float]:
    """Seconds of the tickets of these steps, summed over all rollout workers, and the part spent on activations."""
    tickets = generation_seconds(history, steps)
    wanted = {e["ordinal"] for e in history if e["event"] == "ticket" and e["kind"] == TRAIN and e["step"] in steps}
    spans = [e for e in history if e["event"] == "span" and e["name"] == "activate" and e.get("ordinal") in wanted]
    return tickets, sum(span["end"] - span["start"] for span in spans)


@dataclass
class CpuWatch:
    """Thread that records the CPU seconds of one process, without its child processes."""

    pid: int
    _times: list[float] = field(default_factory=list)
    _used: list[float] = field(default_factory=list)
    _done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def share(self, start: float, end: float) -> float:
        """CPU seconds divided by wall-clock seconds between two Unix times; 0 with fewer than two readings."""
        inside = slice(bisect_left(self._times, start), bisect_left(self._times, end))
        times, used = self._times[inside], self._used[inside]
        return (used[-1] - used[0]) / (times[-1] - times[0]) if len(times) > 1 else 0.0

    def _watch(self) -> None:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            while not self._done.wait(POLL_SECONDS):
                used = process.cpu_times()
                self._times.append(time.time())
                self._used.append(used.user + used.system)
