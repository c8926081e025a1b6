"""Whole runs for `frame.py`: seconds per step by the clock, and CPU seconds per step of every process."""

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.performance.processes import Threads, Tree
from tests.performance.start import whole_lines

POLL_SECONDS = 0.05
LOOK_SECONDS = 1.0
"""Interval of the looks at all processes, which take several milliseconds and so would slow the run down."""
OUTPUT = "output.txt"
LAST = 2
"""Steps after the last that counts: with nothing left to sample, the trainer has the machine for itself."""


@dataclass(frozen=True)
class Run:
    """A run after its warm-up, per step."""

    clock: float
    parts: dict[str, float]
    """CPU seconds by the part that a process plays."""
    threads: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Part → CPU seconds of the busiest thread of its processes, and of all their other threads."""
    peak_bytes: int = 0
    """Most that the resident sets of all processes came to; pages that several share count for each."""

    @property
    def cpu(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Seen:
    """The state of a run when it was looked at."""

    steps: int
    clock: float
    parts: dict[str, float]
    threads: Threads


def run(overrides: Sequence[str], *, warm_up: int, steps: int, directory: Path) -> Run:
    """Makes a run of `warm_up` + `steps` + LAST steps. Raises RuntimeError, with its output, for one that fails.

    The first steps have imports and first shapes, and are not counted.
    """
    out, log = directory / "run", directory / OUTPUT
    total = [f"total_steps={warm_up + steps + LAST}", f"output_dir={out}"]
    with log.open("wb") as output:
        command = [sys.executable, "-m", "async_flowrl.main", *overrides, *total]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        tree = Tree(process.pid, out)
        before = until(warm_up, process, tree, out)
        after = until(warm_up + steps, process, tree, out)
        process.wait()
    if process.returncode:
        raise RuntimeError(log.read_text())
    made = after.steps - before.steps
    parts = {part: (after.parts[part] - before.parts.get(part, 0.0)) / made for part in after.parts}
    threads = {part: (most / made, rest / made) for part, (most, rest) in after.threads.since(before.threads).items()}
    return Run((after.clock - before.clock) / made, parts, threads, tree.peak_bytes)


def until(step: int, process: "subprocess.Popen[bytes]", tree: Tree, out: Path) -> Seen:
    """Waits until metrics.jsonl has `step` steps; it may have a few more."""
    metrics, looked = out / "metrics.jsonl", 0.0
    while process.poll() is None:
        done = len(whole_lines(metrics)) if metrics.exists() else 0
        if done >= step:
            clock = time.monotonic()
            tree.look()
            return Seen(done, clock, tree.by_part(), tree.threads())
        if time.monotonic() - looked >= LOOK_SECONDS:
            tree.look()
            looked = time.monotonic()
        time.sleep(POLL_SECONDS)
    raise RuntimeError(f"the run ended before step {step}:\n{(out.parent / OUTPUT).read_text()}")
