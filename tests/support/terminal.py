"""Terminal runs a program on a real pseudo-terminal and shows the screen that a person would see."""

import os
import sys
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pexpect
import pyte

ROOT = Path(__file__).parents[2]
LIMIT = 240.0
"""Longest time in seconds that each wait may take."""
LEFT_OUT = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "PYTHONIOENCODING")
"""Variables of the tests' environment that a program on a terminal must not inherit."""


class Terminal:
    """Runs `program <arguments>`, by default Python, on a terminal with `columns` and `rows`."""

    def __init__(
        self,
        arguments: Sequence[str],
        columns: int = 80,
        rows: int = 24,
        *,
        program: str = sys.executable,
        environment: dict[str, str] | None = None,
    ) -> None:
        surroundings = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
        surroundings |= {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), **(environment or {})}
        self.child = pexpect.spawn(
            program, list(arguments), dimensions=(rows, columns), env=surroundings, cwd=str(ROOT), timeout=LIMIT
        )
        self.modes = termios.tcgetattr(self.child.child_fd)
        """Settings of the terminal before the program changes them."""
        self.raw = b""
        """All bytes that the program has written."""
        self._screen = pyte.HistoryScreen(columns, rows, history=5000)
        self._stream = pyte.ByteStream(self._screen)

    @property
    def lines(self) -> list[str]:
        """Lines on the screen, without empty lines at its end."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip().splitlines()

    @property
    def above(self) -> list[str]:
        """Lines that have scrolled off the screen."""
        width = self._screen.columns
        return ["".join(row[column].data for column in range(width)).rstrip() for row in self._screen.history.top]

    @property
    def text(self) -> str:
        return "\n".join([*self.above, *self.lines])

    def colours(self, line: int) -> set[str]:
        """Returns the colours of the characters in a line of the screen."""
        return {cell.fg for cell in self._screen.buffer[line].values()}

    @property
    def sane(self) -> bool:
        """True if the cursor is visible and the terminal's settings are those from before the program."""
        return not self._screen.cursor.hidden and termios.tcgetattr(self.child.child_fd) == self.modes

    def until(self, shown: Callable[["Terminal"], bool], what: str) -> None:
        """Reads until `shown(self)` is True. Raises AssertionError, which names `what`, after LIMIT or at the end."""
        end = time.monotonic() + LIMIT
        while not shown(self):
            if not self._read() or time.monotonic() > end:
                raise AssertionError(f"{what} never showed:\n{self.text}")

    def end(self) -> int:
        """Waits until the program has ended and returns its exit code, or minus the number of the signal that ended it.

        `was_sane` then says whether the terminal was sane.
        """
        end = time.monotonic() + LIMIT
        while self._read():
            assert time.monotonic() < end, f"it does not end:\n{self.text}"
        self.was_sane = self.sane
        self.child.close()
        return -int(self.child.signalstatus) if self.child.signalstatus else int(self.child.exitstatus or 0)

    def resize(self, columns: int, rows: int) -> None:
        self.child.setwinsize(rows, columns)
        self._screen.resize(rows, columns)

    def _read(self) -> bool:
        """Reads what the program has written; returns False if the program has ended."""
        try:
            piece = self.child.read_nonblocking(65536, timeout=0.2)
        except pexpect.TIMEOUT:
            return True
        except (pexpect.EOF, OSError):
            return False
        self.raw += piece
        self._stream.feed(piece)
        return True
