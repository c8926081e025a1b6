"""Command line: async-flowrl report RUN [RUN ...] [--out FILE].

It writes one HTML page about one run or several runs side by side.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from async_flowrl.config import exit_codes
from async_flowrl.report.folders import NoRun, runs_in
from async_flowrl.report.write import write_page


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page and prints its path; returns the exit code (2 with one sentence on stderr if it cannot)."""
    given = parser().parse_args(arguments)
    try:
        runs = runs_in(given.runs)
        out = given.out or (runs[0] / "report.html" if len(runs) == 1 else given.runs[0] / "report.html")
        if given.out is None and len(runs) > 1 and len(given.runs) > 1:
            out = Path("report.html")
        sys.stdout.write(f"{write_page(runs, out, max_mib=given.max_mib)}\n")
    except (NoRun, FileNotFoundError, ValueError, OSError) as error:
        sys.stderr.write(f"async-flowrl report: {error}\n")
        return exit_codes.CONFIG
    return exit_codes.OK


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="async-flowrl report",
        description="Writes one page about run directories: report.html in the run's folder, in the folder that holds "
        "all runs, or in the current one for several folders.",
    )
    made.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run directory, or a folder of a --multirun")
    made.add_argument("--out", type=Path, help="file to write")
    made.add_argument(
        "--max-mib", type=float, help="MiB of images in the page (default: monitor.report_mib of the runs)"
    )
    return made
