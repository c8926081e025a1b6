"""Command line: async-flowrl report RUN [RUN ...] [--out FILE | --live].

It writes one HTML page about one run or several runs side by side, or serves it while they go on (--live).
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from async_flowrl.config import exit_codes
from async_flowrl.config.listening import LOOPBACK, read_token
from async_flowrl.report.folders import NoRun, runs_in
from async_flowrl.report.write import write_page


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page and prints its path, or serves it until Ctrl-C; returns the exit code (2 with one sentence on
    stderr if it cannot)."""
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
