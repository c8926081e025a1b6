"""Writing to stdout and stderr, be it a terminal, a pipe or nobody who reads."""

import logging
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.table import Table

logger = logging.getLogger(__name__)

WIDTH = 120
"""Characters of a table that no terminal shows."""


def print_table(drawn: "Table") -> None:
    """On stdout, as wide as the terminal is where there is one."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else WIDTH).print(drawn)


def say(text: str, stream: TextIO | None = None) -> None:
    """Writes to stdout, or to the stream that is given, at once.

    Whoever reads it may be gone: `tee` dies of the same Ctrl-C as the run, `head` has enough. That ends no run: what is
    written from then on is dropped, and the log says so.
    """
    stream = stream or sys.stdout
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        logger.warning("nobody reads %s any more: the run goes on without it", stream.name)
