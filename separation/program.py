"""Program runs a command in a process of its own, which ends when the worker process that started it has ended.

The workers of reward servers use it (async_flowrl/rewards/server_worker.py).
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from separation import keeper

TAIL_BYTES = 4000
"""Number of bytes at the end of the output that `tail` reads."""


class Program:
    """One run of a command, with its output appended to `log`.

    A keeper process (keeper.py) between this process and the program ends the program, and all processes that it
    started, when this process is gone.
    """

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], log: Path, grace: float) -> None:
        """Starts the command. `environment` is its whole environment, `grace` the seconds that `stop` gives it.

        Raises OSError if the log cannot be written.
        """
        self.command, self.log, self._grace = list(command), log, grace
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._from = output.tell()
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", keeper.__file__, str(os.getpid()), f"{grace:g}", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        self.pid = self._keeper.pid
        """Pid of the keeper, which is also the id of the process group."""

    def exit_code(self) -> int | None:
        """Returns the exit code, 128 + n after signal n, 127 if it was not found; None while the program runs."""
        return self._keeper.poll()

    def wait(self) -> int:
        """Waits for the end of the program, kills what is left of its process group, and returns the exit code."""
        code = self._keeper.wait()
        self._kill_group()
        return code

    def stop(self) -> None:
        """Ends the program by SIGTERM, and by SIGKILL after the grace time; returns when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._keeper.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._keeper.wait(self._grace + 15)
        self._kill_group()
        self._keeper.wait()

    def tail(self) -> str:
        """Returns the end of its output on one line (TAIL_BYTES / 8 characters at most)."""
        with self.log.open("rb") as output:
            output.seek(0, os.SEEK_END)
            output.seek(max(self._from, output.tell() - TAIL_BYTES))
            text = output.read().decode("utf-8", "replace")
        return " ".join(text.split())[-TAIL_BYTES // 8 :]

    def _kill_group(self) -> None:
        """Kills processes that are left if the keeper itself was killed."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
