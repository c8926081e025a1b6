"""Processes with a time limit: a check that hangs in a driver or in NCCL can only be ended from outside."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

GRACE_SECONDS = 5.0
"""From the request to end until processes are killed."""


@dataclass(frozen=True)
class Ended:
    """`code`: the exit code, negative for a signal; None where the time limit ended the process."""

    code: int | None
    log: Path

    def last_words(self) -> str:
        """The last line of the log that says something; empty where there is none."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def run_within(
    command: Sequence[str], seconds: float, log: Path, *, environment: Mapping[str, str], cwd: Path | None = None
) -> Ended:
    """Runs a command until it ends or the time is over; both of its streams go to `log`.

    The command gets a session of its own; whatever of that session still lives afterwards is ended as well.
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
    """Ends all processes of a session and what they have started, politely first. The leader may have ended before."""
    living = members(leader)
    for process in living:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(living, GRACE_SECONDS)
    for process in {*alive, *members(leader)}:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def members(leader: int) -> list[psutil.Process]:
    """The living processes of a session, and their descendants in whatever session."""
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found |= {process, *process.children(recursive=True)}
    return list(found)
