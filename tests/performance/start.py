"""python -m tests.performance.start [--rounds 3] [--json FILE] [key=value ...]: CPU seconds to the first step's end.

A run of the tiny model as a user starts it, once on Ray and once in one process, in turns; by process. CPU seconds, so
that it can be read on a busy machine, and seconds by the clock, for a quiet one. The project's code is compiled before,
as it is for whoever starts a second run. Then commands that only answer: the number of the version, a bad input.
`--json` keeps everything for `docs/write_benchmarks.py`.
"""

import argparse
import compileall
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from async_flowrl.benchmark.describe import machine_description
from async_flowrl.benchmark.table import as_sentence, markdown_table
from async_flowrl.plan.arguments import count
from tests.performance.answers import MOST_SECONDS, answer_seconds
from tests.performance.processes import Tree

PROGRAM = "python -m tests.performance.start"
BACKENDS = ("ray", "local")
SHORT = ("total_steps=3", "monitor.report=false")
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("async_flowrl", "separation", "checkpoint_engine")
POLL_SECONDS = 0.02
ALL, CLOCK = "all", "seconds by the clock"
NAMES = {"ray": "Ray", "local": "one process"}
FIRST_STEP_SECONDS = 8
"""From the command to the end of the first step by the clock of a quiet machine, files warm."""


def to_first_step(overrides: Sequence[str], directory: Path) -> dict[str, float]:
    """CPU seconds by part of one run until its first step is in metrics.jsonl, their sum, and the seconds by the clock.

    Raises RuntimeError if there is no such step.
    """
    out, log = directory / "run", directory / "output.txt"
    command = [sys.executable, "-m", "async_flowrl.main", *SHORT, *overrides, f"output_dir={out}"]
    began = time.monotonic()
    with log.open("wb") as output:
        run = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        tree = Tree(run.pid, out)
        while not has_a_step(out / "metrics.jsonl"):
            if run.poll() is not None:
                raise RuntimeError(f"the run ended before its first step:\n{log.read_text()}")
            tree.look()
            time.sleep(POLL_SECONDS)
        clock = time.monotonic() - began
        tree.look()
        parts = tree.by_part()
        if run.wait() != 0:
            raise RuntimeError(log.read_text())
    return {**parts, ALL: sum(parts.values()), CLOCK: clock}


def compile_packages() -> None:
    """Writes the bytecode of the project's packages, which PYTHONDONTWRITEBYTECODE may have prevented so far."""
    for package in PACKAGES:
        compileall.compile_dir(ROOT / package, quiet=1)


def has_a_step(metrics: Path) -> bool:
    return metrics.exists() and any("loss" in json.loads(line) for line in whole_lines(metrics))


def whole_lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def measure(overrides: Sequence[str], rounds: int) -> dict[str, dict[str, float]]:
    """Backend → part → median of the rounds, which take the backends in turns."""
    taken: dict[str, list[dict[str, float]]] = {backend: [] for backend in BACKENDS}
    for _ in range(rounds):
        for backend in BACKENDS:
            with tempfile.TemporaryDirectory() as directory:
                taken[backend].append(to_first_step([f"runtime.backend={backend}", *overrides], Path(directory)))
    return {backend: medians(each) for backend, each in taken.items()}


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in rounds for name in each)
    return {name: median(each.get(name, 0.0) for each in rounds) for name in names}


def goals(measured: Mapping[str, Mapping[str, float]], answers: Mapping[str, float]) -> list[tuple[str, ...]]:
    """Rows with each goal: what is measured, the goal, what it took, and whether it is met."""
    asked = [("to the end of step 1 on Ray, by the clock", FIRST_STEP_SECONDS, measured["ray"][CLOCK], "s")]
    asked += [(name, MOST_SECONDS, seconds, "s of CPU") for name, seconds in answers.items()]
    return [
        (what, f"≤ {most:g} {unit}", f"{taken:.2f}", "yes" if taken <= most else "**no**")
        for what, most, taken, unit in asked
    ]


def markdown(record: Mapping[str, Any]) -> str:
    """The command, the machine, the seconds by process, and the goals."""
    rows = [
        (NAMES[backend], part, f"{seconds:.2f}")
        for backend, parts in record["measured"].items()
        for part, seconds in sorted(parts.items(), key=lambda item: -item[1])
    ]
    tables = (
        markdown_table(("backend", "what", "s to the end of step 1, of CPU if nothing else is said"), rows),
        markdown_table(("what", "goal", "measured", "met"), goals(record["measured"], record["answers"])),
    )
    return "\n\n".join([f"    {record['command']}", as_sentence(record["description"]), *tables]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog=PROGRAM)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where all that was measured is written")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_intermixed_args()
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
    compile_packages()
    record = {
        "command": shlex.join([*PROGRAM.split(), *sys.argv[1:]]),
        "description": machine_description(),
        "measured": measure(given.overrides, given.rounds),
        "answers": answer_seconds(given.rounds),
    }
    if given.json is not None:
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    sys.stdout.write(markdown(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
