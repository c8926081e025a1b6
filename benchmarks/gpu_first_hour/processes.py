"""Processes with a time limit. Nothing that such a process has started outlives it, in whatever session it is."""

import os
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

GRACE_SECONDS = 5.0
"""Seconds between SIGTERM and SIGKILL."""
_ROUNDS = 5
"""Number of searches for processes that were started while others were killed."""


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int | None
    """Exit code, negative for a signal; None if the limit ended it."""
    left_over: tuple[str, ...]
    """Names of the processes that were still there and were killed."""


def run_within(
    command: Sequence[str], seconds: float, log: Path, environment: Mapping[str, str], cwd: Path | None = None
) -> Ended:
    """Runs a command until it ends or `seconds` are over; its output and errors are appended to `log`."""
    mark = f"GPU_FIRST_HOUR_{secrets.token_hex(8)}"
    with log.open("ab") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, env={**environment, mark: "1"}, cwd=cwd, start_new_session=True
        )
    code = None
    try:
        code = process.wait(max(seconds, 0.0))
        psutil.wait_procs(marked(mark), GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    finally:
        left_over = end_marked(mark)
        process.wait()
    return Ended(code, left_over)


def end_marked(mark: str) -> tuple[str, ...]:
    """Kills every process whose environment has the variable `mark`, and its descendants; returns their names."""
    killed: list[str] = []
    for _ in range(_ROUNDS):
        found = marked(mark)
        for process in found:
            with suppress(psutil.NoSuchProcess):
                killed.append(process.name())
                process.kill()
        psutil.wait_procs(found, GRACE_SECONDS)
        if not found:
            break
    return tuple(killed)


def marked(mark: str) -> list[psutil.Process]:
    """Returns the living processes with the variable `mark` in their environment, and their descendants."""
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and mark in process.environ():
                found |= {process, *process.children(recursive=True)}
    return [process for process in found if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
