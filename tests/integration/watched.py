"""A run that is a process, with what was seen of its processes while it trained and after its end."""

import os
import re
import subprocess
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import psutil

from separation.processes import alive
from tests.integration.runs import Run, finish, start, wait_until
from tests.support.forked_workers import NAME, server
from tests.support.marked import left_after, marked_processes

SECONDS = 20.0
"""A busy machine takes a moment to end what was killed; an agent of Ray that was forgotten lives for a minute."""


@dataclass(frozen=True)
class WatchedRun(Run):
    """A run directory, and the processes that it had."""

    created: dict[str, float] = field(default_factory=dict)
    """Worker → the `time.time()` at which its process was created."""
    left: list[str] = field(default_factory=list)
    """Command lines, or names of workers, of the processes that outlived the run by SECONDS."""


def watched_on_ray(folder: Path, mode: str, *overrides: str, program: str = "benchmarks.disturbed") -> WatchedRun:
    """A run of at least four steps with its own Ray cluster, looked at after the third; `program` makes it.

    Its workers are forked if the program lets them (gates.py).
    """
    mark = f"mark-{uuid.uuid4()}"
    with mock.patch.dict(os.environ, {"TEST_MARK": mark, NAME: server()}):
        process = start(folder, mode, *overrides, program=program)
    try:
        wait_until(process, lambda: len(Run(folder).metrics) >= 3, "its third step")
        run = Run(folder)
        workers = {event["worker"]: psutil.Process(event["pid"]) for event in run.events if event["event"] == "worker"}
        times = {path.stem: created(path) for path in (folder / "logs").glob("*-*.log")}
        finish(process, 0)
    finally:
        process.kill()

    def left() -> list[str]:
        return [*marked_processes(mark), *(name for name, process in workers.items() if alive(process))]

    return WatchedRun(folder, times, left_after(SECONDS, left))


def created(log: Path) -> float:
    """The `time.time()` at which the process that wrote a log was created, to about a hundredth of a second.

    What psutil says rests on the time of the machine's boot, which is a second off on some machines; so it is compared
    with a process that is created now.
    """
    known = re.search(r"process (\d+) on", log.read_text())
    assert known is not None
    with subprocess.Popen(["sleep", "60"]) as now:
        off = psutil.Process(now.pid).create_time() - time.time()
        now.kill()
    return psutil.Process(int(known[1])).create_time() - off
