"""Processes with a time limit: a check that hangs in a driver or in NCCL can only be ended from another process."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

GRACE_SECONDS = 5.0
"""Seconds between the request to end (SIGTERM) and the kill."""


@dataclass(frozen=True)
class Ended:
    """A process that has ended. `code` is its exit code, negative for a signal, None if the time limit ended it."""

    code: int | None
    log: Path

    def last_words(self) -> str:
        """Returns the last line of the log that is not blank; empty if there is none."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def run_within(
    command: Sequence[str], seconds: float, log: Path, *, environment: Mapping[str, str], cwd: Path | None = None
) -> Ended:
    """Runs a command until it ends or `seconds` are over; its output and errors go to `log`.

    The command gets a session of its own; remaining processes of that session are ended as well.
    """
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=dict(environment), cwd=cwd, start_new_session=True
        )
        try:
            return Ended(process.wait(seconds), log)
        except subprocess.TimeoutExpired:
            return Ended(None, log)
        finally:
            end_session(process.pid)
            process.wait()


def end_session(leader: int) -> None:
    """Ends all processes of a session and their descendants: SIGTERM first, then kill.

    The session's leader may have ended before.
    """
    living = members(leader)
    for process in living:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(living, GRACE_SECONDS)
    for process in {*alive, *members(leader)}:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def members(leader: int) -> list[psutil.Process]:
    """Returns the living processes of a session, and their descendants in any session."""
    processes: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                processes |= {process, *process.children(recursive=True)}
    return list(processes)
