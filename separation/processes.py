"""Processes of this machine: which one a worker's is, what they started, and how to be sure they are gone."""

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

_POLL_SECONDS = 0.02


def machine() -> str:
    """Boot id and pid namespace: pids that two processes name mean the same processes where these are equal."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def identity() -> tuple[int, float, str]:
    """This process for `process_of`: its pid, when it was created, and its machine."""
    return os.getpid(), psutil.Process().create_time(), machine()


def process_of(pid: int, created: float, of_machine: str) -> psutil.Process | None:
    """The process that said so of itself; None if it is gone, elsewhere, or its pid is another process's by now."""
    with suppress(psutil.NoSuchProcess):
        if of_machine == machine() and (process := psutil.Process(pid)).create_time() == created:
            return process
    return None


def alive(process: psutil.Process) -> bool:
    """False as well when only its exit code waits to be collected."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    return False


def kill(process: psutil.Process) -> None:
    """SIGKILL, if it is still that process."""
    with suppress(psutil.NoSuchProcess):
        process.kill()


def descendants(pid: int) -> list[psutil.Process]:
    """Children, their children and so on, as far as they are still attached to `pid`."""
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return [process for process in psutil.Process(pid).children(recursive=True) if alive(process)]
    return []


def kill_remaining(processes: Iterable[psutil.Process], *, grace: float) -> list[psutil.Process]:
    """Waits up to `grace` seconds for the processes to end, then kills those that did not; returns these."""
    waiting = list(processes)
    end = time.monotonic() + grace
    while (waiting := [process for process in waiting if alive(process)]) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    for process in waiting:
        kill(process)
    return waiting
