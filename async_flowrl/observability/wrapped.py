"""Text lines "name sentence" that a run prints at its start and end; a terminal gets them wrapped at words."""

import shutil
import sys
import textwrap
from collections.abc import Sequence

MIN_WIDTH = 30
"""Lines are not wrapped if the terminal has fewer columns than this."""


def named_lines(rows: Sequence[tuple[str, object]], label: int) -> str:
    """The rows (name, sentence) as text. A name takes `label` columns and one space; wrapped lines are indented so."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    return "".join(_line(name, str(sentence), label, width) for name, sentence in rows)


def _line(name: str, sentence: str, label: int, width: int) -> str:
    start, indent = f"{name:{label}} ", " " * (label + 1)
    if width < MIN_WIDTH:
        return f"{start}{sentence}\n"
    pieces = textwrap.wrap(
        sentence, width, initial_indent=start, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(pieces or [start]) + "\n"
