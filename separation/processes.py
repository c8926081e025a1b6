"""Helpers for processes of this machine: a worker's process, its descendants, killing what is left, and signals."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

_POLL_SECONDS = 0.02


def machine() -> str:
    """Returns the boot id and the pid namespace as text; where it is equal, a pid names the same process."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def identity() -> tuple[int, float, str]:
    """Returns pid, creation time (unix seconds) and `machine()` of this process, the arguments of `process_of`."""
    return os.getpid(), psutil.Process().create_time(), machine()


def process_of(pid: int, created: float, of_machine: str) -> psutil.Process | None:
    """Returns the process with this `identity`; None if it has ended (its pid may be reused) or runs elsewhere."""
    with suppress(psutil.NoSuchProcess):
        if of_machine == machine() and (process := psutil.Process(pid)).create_time() == created:
            return process
    return None


def alive(process: psutil.Process) -> bool:
    """Returns True if the process runs; False also for a zombie, whose exit code was not collected yet."""
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    return False


def kill(process: psutil.Process) -> None:
    """Sends SIGKILL if the process still exists; another process that has its pid by now is not killed."""
    with suppress(psutil.NoSuchProcess):
        process.kill()


def descendants(pid: int) -> list[psutil.Process]:
    """Returns the live children of `pid`, their children and so on; orphans that left this tree are not found."""
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return [process for process in psutil.Process(pid).children(recursive=True) if alive(process)]
    return []


def kill_trees(roots: Callable[[], Sequence[psutil.Process]]) -> list[psutil.Process]:
    """Kills the processes of `roots()` with their descendants; all are stopped first, so that none starts another."""
    stopped: list[psutil.Process] = []
    while missed := [
        process for root in roots() for process in (root, *descendants(root.pid)) if process not in stopped
    ]:
        for process in dict.fromkeys(missed):
            with suppress(psutil.NoSuchProcess):
                process.suspend()
            stopped.append(process)
    for process in stopped:
        kill(process)
    return stopped


def kill_remaining(processes: Iterable[psutil.Process], *, grace: float) -> list[psutil.Process]:
    """Waits up to `grace` seconds for the processes to end, kills the others, and returns those that it killed."""
    waiting = list(processes)
    end = time.monotonic() + grace
    while (waiting := [process for process in waiting if alive(process)]) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    for process in waiting:
        kill(process)
    return waiting


@contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if handler is None else handler)


@contextmanager
def sigterm_ours_alone() -> Iterator[None]:
    """Context in which started processes inherit a blocked SIGTERM; this process keeps its own handler."""
    # `ray.init` replaces the handler. Slurm, `timeout` and shells send SIGTERM to every process of a job. This process
    # then ends in order, with a checkpoint, and needs its workers for that; they are ended by SIGKILL when it is done.
    # Daemons and the workers that they start inherit the mask of blocked signals.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
