"""async-flowrl report RUN [RUN ...] [--out FILE | --live]: one page about one run, or several side by side."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from async_flowrl.config import exit_codes
from async_flowrl.config.listening import LOOPBACK, read_token
from async_flowrl.report.write import write_page

MAX_RUNS = 32
"""On one page; more lines cannot be told apart."""


class NoRun(ValueError):
    """A folder that is neither a run directory nor holds any."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page and prints its path; returns the exit code."""
    given = parser().parse_args(arguments)
    try:
        if given.live:
            from async_flowrl.report.live import serve

            token = read_token(given.token_env, given.token_file)
            return serve(given.runs, host=given.host, port=given.port, token=token)
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
    live = made.add_argument_group("while runs go on")
    live.add_argument("--live", action="store_true", help="serve the page, which shows new points and images by itself")
    live.add_argument("--port", type=int, help="of --live; 0: any that is free (default: 8765)")
    live.add_argument("--host", default=LOOPBACK, help="address to listen at; others than this machine need a token")
    live.add_argument("--token-env", metavar="NAME", help="environment variable with the token that browsers must send")
    live.add_argument("--token-file", type=Path, metavar="FILE", help="the same from a file")
    return made


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
