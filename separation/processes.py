"""Processes of this machine, read from /proc: who they are, their children, and how to be sure they are gone."""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Identity:
    """A process, told apart from every other one that ever had its number. `started` is in clock ticks since boot."""

    pid: int
    started: int
    machine: str
    """Boot id and pid namespace."""

    @classmethod
    def of(cls, pid: int) -> "Identity | None":
        """None when there is no such process, or only its exit code waits to be collected."""
        fields = _stat(pid)
        if fields is None or fields[0] in "ZX":
            return None
        return cls(pid, int(fields[19]), _machine())

    def alive(self) -> bool:
        """False as well when it is a process of another machine."""
        return Identity.of(self.pid) == self

    def kill(self) -> None:
        """SIGKILL, if it is still that process."""
        if self.alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def descendants(pid: int) -> list[Identity]:
    """Children, their children and so on, as far as they are still attached to `pid`."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) is not None:
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[Identity] = []
    frontier = list(children.get(pid, ()))
    while frontier:
        child = frontier.pop()
        frontier += children.get(child, ())
        if (identity := Identity.of(child)) is not None:
            found.append(identity)
    return found


def kill_remaining(processes: Iterable[Identity], *, grace: float) -> list[Identity]:
    """Waits up to `grace` seconds for the processes to end, then kills those that did not; returns these."""
    waiting = list(processes)
    end = time.monotonic() + grace
    while (waiting := [process for process in waiting if process.alive()]) and time.monotonic() < end:
        time.sleep(0.02)
    for process in waiting:
        process.kill()
    return waiting


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/pid/stat from the third on: state, parent, …"""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return text[text.rindex(")") + 2 :].split()


def _machine() -> str:
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
