"""A program that a worker runs beside it, and that never outlives the worker, whatever ends it."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from separation import keeper

TAIL_BYTES = 4000
"""Of a program's output, as many are quoted when it has ended."""


class Program:
    """One run of a command, with its output appended to `log`.

    Between this process and the program stands a keeper (keeper.py), which ends the program and all that it started
    when this process is gone.
    """

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], log: Path, grace: float) -> None:
        """Starts it. `environment` is the whole of it. Raises OSError if the log cannot be written."""
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
        """The keeper's: also the id of the process group."""

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._keeper.poll()

    def wait(self) -> int:
        """Waits for its end, and sees to it that nothing of its group is left."""
        code = self._keeper.wait()
        self._kill_group()
        return code

    def stop(self) -> None:
        """Ends it: SIGTERM, then SIGKILL after the grace. Returns when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._keeper.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._keeper.wait(self._grace + 15)
        self._kill_group()
        self._keeper.wait()

    def tail(self) -> str:
        """The end of what it has written, on one line."""
        with self.log.open("rb") as output:
            output.seek(0, os.SEEK_END)
            output.seek(max(self._from, output.tell() - TAIL_BYTES))
            text = output.read().decode("utf-8", "replace")
        return " ".join(text.split())[-TAIL_BYTES // 8 :]

    def _kill_group(self) -> None:
        """What a keeper that was killed itself has left behind."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
