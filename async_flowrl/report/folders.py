"""The run directories that folders on a command line stand for."""

import sys
from collections.abc import Sequence
from pathlib import Path

MAX_RUNS = 32
"""On one page; more lines cannot be told apart."""


class NoRun(ValueError):
    """A folder that is neither a run directory nor holds any."""


def runs_in(folders: Sequence[Path]) -> list[Path]:
    """The run directories: each folder itself, or all that lie below it, in the order of their names (2 before 10)."""
    found: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise NoRun(f"{folder} is no folder; a run directory is what output_dir names")
        here = [folder] if is_run(folder) else sorted((p for p in folder.glob("*") if is_run(p)), key=_natural)
        here = here or sorted((p.parent for p in folder.glob("*/*/config.yaml") if is_run(p.parent)), key=_natural)
        if not here:
            raise NoRun(f"{folder} is no run directory and holds none: there is no metrics.jsonl in it or below it")
        found += [run for run in here if run not in found]
    if len(found) > MAX_RUNS:
        raise NoRun(f"{len(found)} runs are too many for one page, which shows at most {MAX_RUNS}: name those you mean")
    return found


def is_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file()


def _natural(path: Path) -> list[tuple[int, str]]:
    """Numbers by value, and before other names."""
    return [(int(part), "") if part.isdigit() else (sys.maxsize, part) for part in path.parts]
