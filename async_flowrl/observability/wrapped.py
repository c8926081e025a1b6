"""Lines of a name and a sentence, at the start and the end of a run: broken at words on a terminal, whole elsewhere."""

import shutil
import sys
import textwrap
from collections.abc import Sequence

MIN_WIDTH = 30
"""Columns; on a narrower terminal the lines are left to it."""


def named_lines(rows: Sequence[tuple[str, object]], label: int) -> str:
    """Each name takes `label` columns and one space; what wraps stands below its sentence."""
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
