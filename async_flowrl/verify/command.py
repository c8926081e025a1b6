"""The command line of `verify`: it prints a row per check; the exit code is 0 if all checks hold."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from async_flowrl.verify.checks import verify
from separation.table import format_table

REQUIRED_FILES = ("metrics.jsonl", "events.jsonl", "summary.json")
DESCRIPTION = "Checks a finished run from its files alone; the exit code is 0 if all checks hold."


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if all checks hold, 1 if one does not, and 2 if the folder is not that of a finished run."""
    parser = argparse.ArgumentParser(prog="python -m async_flowrl.verify", description=DESCRIPTION)
    parser.add_argument("run_dir", type=Path)
    root = parser.parse_args(arguments).run_dir.expanduser()
    unfinished = [name for name in REQUIRED_FILES if not (root / name).is_file()]
    if unfinished:
        sys.stderr.write(f"{root} is not the folder of a finished run: it has no {unfinished[0]}\n")
        return 2
    try:
        rows = verify(root)
    except (OSError, ValueError, KeyError) as error:
        sys.stderr.write(f"{root} cannot be verified: {type(error).__name__}: {error}\n")
        return 2
    table = format_table(("check", "holds", "found"), [(name, "yes" if ok else "NO", text) for name, ok, text in rows])
    sys.stdout.write(table + "\n")
    return 0 if all(ok for _, ok, _ in rows) else 1
