"""Search for run directories in the folders that a command line names."""

import sys
from collections.abc import Sequence
from pathlib import Path

MAX_RUNS = 32
"""Largest number of runs on one page."""


class NoRun(ValueError):
    """No run directory was found in a folder, or too many were found in all."""


def runs_in(folders: Sequence[Path]) -> list[Path]:
    """The run directories of all folders: a folder itself, or else those one level below it, or else two levels below.

    Those of one folder are sorted by name, with numbers by value. Raises NoRun for a folder without any, and for more
    than MAX_RUNS in all.
    """
    runs: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise NoRun(f"{folder} is no folder; a run directory is what output_dir names")
        here = [folder] if is_run(folder) else sorted((p for p in folder.glob("*") if is_run(p)), key=_natural)
        here = here or sorted((p.parent for p in folder.glob("*/*/config.yaml") if is_run(p.parent)), key=_natural)
        if not here:
            raise NoRun(f"{folder} is no run directory and holds none: there is no metrics.jsonl in it or below it")
        runs += [run for run in here if run not in runs]
    if len(runs) > MAX_RUNS:
        raise NoRun(f"{len(runs)} runs are too many for one page, which shows at most {MAX_RUNS}: name those you mean")
    return runs


def is_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file()


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sort key: parts of the path that are numbers are compared by value and come before other names."""
    return [(int(part), "") if part.isdigit() else (sys.maxsize, part) for part in path.parts]
