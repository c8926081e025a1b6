"""async-flowrl report RUN [RUN ...] [--out FILE]: one HTML page about one run or several runs side by side."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from async_flowrl.config import exit_codes
from async_flowrl.observability.terminal import refuse
from async_flowrl.report.page import write_page

MAX_RUNS = 32  # Largest number of runs on one page.


def runs_in(folders: Sequence[Path]) -> list[Path]:
    """The run directories of all folders: a folder itself, or else those one level below it, or else two levels below.

    Sorted by name, with numbers by value. Raises ValueError for a folder without any, and for more than MAX_RUNS.
    """
    runs: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder; a run directory is what output_dir names")
        here = [folder] if is_run(folder) else sorted((p for p in folder.glob("*") if is_run(p)), key=_natural)
        here = here or sorted((p.parent for p in folder.glob("*/*/config.yaml") if is_run(p.parent)), key=_natural)
        if not here:
            raise ValueError(
                f"{folder} is no run directory and holds none: there is no metrics.jsonl in it or below it"
            )
        runs += [run for run in here if run not in runs]
    if len(runs) > MAX_RUNS:
        raise ValueError(
            f"{len(runs)} runs are too many for one page, which shows at most {MAX_RUNS}: name those you mean"
        )
    return runs


def is_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file()


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (sys.maxsize, part) for part in path.parts]


def main(arguments: Sequence[str] | None = None) -> int:
    command_line = argparse.ArgumentParser(
        prog="async-flowrl report",
        description="Writes one page about run directories: report.html in the run's folder, in the folder that holds "
        "all runs, or in the current one for several folders.",
    )
    option = command_line.add_argument
    option("runs", metavar="RUN", nargs="+", type=Path, help="a run directory, or a folder of a --multirun")
    option("--out", type=Path, help="file to write, or an existing folder for report.html")
    option("--max-mib", type=float, help="MiB of images in the page (default: monitor.report_mib of the runs)")
    options = command_line.parse_args(arguments)
    try:
        if not 0 <= (options.max_mib or 0) < float("inf"):
            raise ValueError(f"--max-mib must be a number from 0 on, got {options.max_mib}")
        runs = runs_in(options.runs)
        out = options.out or (runs[0] if len(runs) == 1 else options.runs[0] if len(options.runs) == 1 else Path())
        out = out / "report.html" if out.is_dir() else out
        write_page(runs, out, max_mib=options.max_mib)
        sys.stdout.write(f"{out}\n")
    except (ValueError, OSError) as error:
        return refuse(error)
    return exit_codes.OK
