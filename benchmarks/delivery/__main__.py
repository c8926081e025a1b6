"""Command line of the benchmark: `python -m benchmarks.delivery` writes a JSON file and a table.

Each delivery is staged, sealed, sent, verified and acknowledged; the raw primitive moves the same bytes between the
same processes right after it and verifies nothing. A stall is given in copies of the payload within one process.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.delivery.delivery_report import report
from benchmarks.delivery.measure import (
    KILL_MEGABYTES,
    KILL_RECEIVERS,
    MAX_STORE_COPIES,
    after_kill,
    measure,
    obstacle,
    ray_here,
)
from benchmarks.markdown_tables import write_between
from checkpoint_engine.transports import GLOO, NCCL, OBJECT_STORE, PYNCCL


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures all combinations for which this machine has room, or reads an earlier result; then prints a report.

    A process that is connected to a Ray cluster measures there.
    """
    transports = [OBJECT_STORE, GLOO, NCCL, PYNCCL]
    here = transports[:3] if torch.cuda.is_available() else transports[:2]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.delivery", description=__doc__)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[5.0, 50.0, 200.0, 850.0])
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--transports", nargs="+", choices=transports, default=here, help="nccl by default on a GPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kills", type=int, default=3, help="per transport")
    parser.add_argument("--out", type=Path, default=Path("outputs/checkpoint_engine.json"))
    parser.add_argument("--read", type=Path, help="an earlier result, instead of measuring")
    parser.add_argument("--page", type=Path, help="a Markdown page that gets the table, between its two markers")
    options = parser.parse_args(arguments)
    if options.read is None:
        room = MAX_STORE_COPIES * max(*options.megabytes, KILL_MEGABYTES)
        with contextlib.redirect_stdout(sys.stderr), ray_here(room):  # where Ray reports that a process died
            result = asyncio.run(run(options))
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    else:
        result = json.loads(options.read.read_text(encoding="utf-8"))
    if options.page is not None:
        write_between(options.page, "numbers", report(result))
    sys.stdout.write(report(result) + "\n")


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Runs all measurements and returns the result as plain JSON; see measure.py."""
    cells, kills, skipped = [], [], []
    for transport in options.transports:
        for megabytes, receivers in product(options.megabytes, options.receivers):
            if reason := obstacle(transport, megabytes, receivers):
                skipped.append(reason)
            else:
                cells.append(await measure(transport, megabytes, receivers, repeats=options.repeats))
                sys.stderr.write(f"{transport} {megabytes:g} MB to {receivers}: done\n")
        if options.kills and (reason := obstacle(transport, KILL_MEGABYTES, KILL_RECEIVERS)):
            skipped.append(f"SIGKILL of one receiver, {reason}")
        else:
            kills += [await after_kill(transport) for _ in range(options.kills)]
    machine = {"cores": os.cpu_count(), "load": os.getloadavg(), "torch": torch.__version__}
    return {"machine": machine, "repeats": options.repeats, "cells": cells, "after_kill": kills, "skipped": skipped}


if __name__ == "__main__":
    main()
