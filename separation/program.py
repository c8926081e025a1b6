"""Program runs a command in a process of its own, which ends when the worker process that started it has ended."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from separation import reaper

TAIL_BYTES = 4000  # Number of bytes at the end of the output that `tail` reads.
POLL_SECONDS = 0.05  # Interval of the checks whether a stopped program has ended.
KEEPER_SECONDS = 15  # Time beyond the grace time that the reaper has to kill what is left, before it is killed itself.
_ENDED = os.WEXITED | os.WNOWAIT  # Options of waitid: has the reaper ended? It is not reaped.


class Program:
    """One run of a command, with its output appended to `log`."""

    # A reaper (reaper.py) ends it, and all that it started, when this process is gone.

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], log: Path, grace: float) -> None:
        """Starts the command; `grace` is the time limit of `stop`. Raises OSError if the log can't be written."""
        self.command, self.log, self._grace = list(command), log, grace
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._from = output.tell()
            self._reaper = subprocess.Popen(
                [sys.executable, "-I", reaper.__file__, str(os.getpid()), f"{grace:g}", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        self._ending = threading.Lock()  # Held while the reaper is signalled or reaped.
        self.pid = self._reaper.pid  # Pid of the reaper, which is also the id of the process group.

    def exit_code(self) -> int | None:
        """Returns the exit code, 128 + n after signal n, 127 if it was not found; None while the program runs."""
        # When the program has ended, what is left of its process group is killed.
        with self._ending:
            if self._reaper.returncode is None and os.waitid(os.P_PID, self.pid, _ENDED | os.WNOHANG) is not None:
                # Only until the reaper is reaped its pid, and so the group's id, can't be that of other processes.
                self._kill_group()
                self._reaper.wait()
            return self._reaper.returncode

    def wait(self) -> int:
        while (code := self.exit_code()) is None:
            with contextlib.suppress(ChildProcessError):  # Another thread has reaped it.
                os.waitid(os.P_PID, self.pid, _ENDED)
        return code

    def stop(self) -> None:
        if self._signal(lambda: os.kill(self.pid, signal.SIGTERM)):
            end = time.monotonic() + self._grace + KEEPER_SECONDS
            while self.exit_code() is None and time.monotonic() < end:
                time.sleep(POLL_SECONDS)
            self._signal(self._kill_group)
        self.wait()

    def tail(self) -> str:
        """Returns the end of its output on one line (TAIL_BYTES / 8 characters at most)."""
        with self.log.open("rb") as output:
            output.seek(0, os.SEEK_END)
            output.seek(max(self._from, output.tell() - TAIL_BYTES))
            text = output.read().decode("utf-8", "replace")
        return " ".join(text.split())[-TAIL_BYTES // 8 :]

    def _signal(self, send: Callable[[], None]) -> bool:
        with self._ending:
            if self._reaper.returncode is None:
                send()
                return True
            return False

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
