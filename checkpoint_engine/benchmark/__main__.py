"""`python -m checkpoint_engine.benchmark`: a JSON file and a table.

Each delivery is staged, sealed, sent, verified and acknowledged; the raw primitive moves the same bytes between the
same processes right after it and verifies nothing. A stall is given in copies of the payload within one process.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from checkpoint_engine.benchmark.measure import after_kill, measure, memory_needed
from checkpoint_engine.benchmark.report import into_page, report
from checkpoint_engine.transports import GLOO, OBJECT_STORE


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures every combination that fits into memory, then the kills; or reports on an earlier result."""
    options = _parser().parse_args(arguments)
    if options.read is None:
        torch.set_num_threads(1)
        result = asyncio.run(run(options))
        options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    else:
        result = json.loads(options.read.read_text(encoding="utf-8"))
    if options.page is not None:
        into_page(options.page, result)
    sys.stdout.write(report(result) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m checkpoint_engine.benchmark", description=__doc__)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[5.0, 50.0, 200.0, 850.0])
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--transports", nargs="+", choices=(OBJECT_STORE, GLOO), default=[OBJECT_STORE, GLOO])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kills", type=int, default=3, help="per transport")
    parser.add_argument("--out", type=Path, default=Path("checkpoint_engine_benchmark.json"))
    parser.add_argument("--read", type=Path, help="an earlier result, instead of measuring")
    parser.add_argument("--page", type=Path, help="a Markdown page that gets the table, between its two markers")
    return parser


async def run(options: argparse.Namespace) -> dict[str, Any]:
    cells, skipped = [], []
    for transport in options.transports:
        for megabytes in options.megabytes:
            for receivers in options.receivers:
                needed, free = memory_needed(megabytes, receivers), available()
                if needed > free:
                    skipped.append(
                        f"{transport} {megabytes:g} MB to {receivers}: may take {needed:.0f} GB, {free:.0f} GB are free"
                    )
                    continue
                cells.append(await measure(transport, megabytes, receivers, repeats=options.repeats))
                sys.stderr.write(f"{transport} {megabytes:g} MB to {receivers}: done\n")
    kills = [await after_kill(transport) for transport in options.transports for _ in range(options.kills)]
    machine = {"cores": os.cpu_count(), "load": os.getloadavg(), "torch": torch.__version__}
    return {"machine": machine, "repeats": options.repeats, "cells": cells, "after_kill": kills, "skipped": skipped}


def available() -> float:
    """Free gigabytes; Linux's estimate, which counts what caches can give back."""
    with open("/proc/meminfo", encoding="utf-8") as lines:
        return float(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) / 1e6


if __name__ == "__main__":
    main()
