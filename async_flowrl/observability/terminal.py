"""Tables of command-line tools."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 120
"""Characters of a table that no terminal shows."""


def print_table(drawn: "Table") -> None:
    """On stdout, as wide as the terminal is where there is one."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else WIDTH).print(drawn)
