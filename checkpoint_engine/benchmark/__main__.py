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
from checkpoint_engine.transports import GLOO, OBJECT_STORE

COLUMNS = (
    ("transport", "transport", "{}"),
    ("MB", "megabytes", "{:g}"),
    ("receivers", "receivers", "{}"),
    ("delivery s", "delivery_seconds", "{:.3f}"),
    ("primitive s", "primitive_seconds", "{:.3f}"),
    ("fraction", "fraction_of_primitive", "{:.2f}"),
    ("trainer stall, copies", "trainer_stall_memcpys", "{:.2f}"),
    ("worker stall, copies", "worker_stall_memcpys", "{:.2f}"),
    ("loop lag ms", "loop_lag_ms", "{:.1f}"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures every combination that fits into memory, then the kills."""
    parser = argparse.ArgumentParser(prog="python -m checkpoint_engine.benchmark", description=__doc__)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[5.0, 50.0, 200.0, 850.0])
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--transports", nargs="+", choices=(OBJECT_STORE, GLOO), default=[OBJECT_STORE, GLOO])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kills", type=int, default=3, help="per transport")
    parser.add_argument("--out", type=Path, default=Path("checkpoint_engine_benchmark.json"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    result = asyncio.run(run(options))
    options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    sys.stdout.write(table(result) + "\n")


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
    return {"machine": machine, "cells": cells, "after_kill": kills, "skipped": skipped}


def available() -> float:
    """Free gigabytes; Linux's estimate, which counts what caches can give back."""
    with open("/proc/meminfo", encoding="utf-8") as lines:
        return float(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) / 1e6


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = ["| " + " | ".join(title for title, _, _ in COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for cell in result["cells"]:
        values = cell | {"loop_lag_ms": 1000 * cell["loop_lag_seconds"]}
        lines.append("| " + " | ".join(form.format(values[key]) for _, key, form in COLUMNS) + " |")
    lines += [
        f"\nSIGKILL during {kill['megabytes']:g} MB by {kill['transport']}: "
        f"{kill['survivors']} survivors served {kill['seconds']:.2f} s later"
        for kill in result["after_kill"]
    ]
    lines += [f"\nNot measured: {reason}" for reason in result["skipped"]]
    load = " ".join(f"{value:.1f}" for value in result["machine"]["load"])
    return "\n".join([*lines, f"\n{result['machine']['cores']} cores, load averages at the end: {load}"])


if __name__ == "__main__":
    main()
