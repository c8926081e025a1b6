"""Benchmark of all modes on the same devices, with the bound that no mode can beat.

python -m async_flowrl.benchmark [--out DIR] [key=value ...]

It runs `sync` shared (every process samples and trains, in its variants) and separate, then `stream`, `one_step_off`
and `fully_async`, one after another and repeatedly. Beside them it runs bare loops, which measure generation and
training alone. Overrides such as `model.path=Qwen/Qwen-Image` set the load and apply to all.
"""

import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from async_flowrl.benchmark import measure
from async_flowrl.benchmark.compare import compare, parser
from async_flowrl.benchmark.loops import LoopFailed
from async_flowrl.benchmark.table import as_json, markdown, picture
from async_flowrl.benchmark.targets import Results
from async_flowrl.config.check import ConfigError


def write(results: Results, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "benchmark.json").write_text(json.dumps(as_json(results), indent=2) + "\n")
    (out / "benchmark.md").write_text(markdown(results))
    picture(results, out / "benchmark.png")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark and writes its files; returns 0, or 2 for wrong arguments and failed runs."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    given = parser().parse_intermixed_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    out = given.out.expanduser()
    try:
        with tempfile.TemporaryDirectory() as directory:
            results = compare(arguments, Path(directory))
    except (ConfigError, ValueError, measure.RunFailed, LoopFailed) as error:
        sys.stderr.write(f"benchmark: {error}\n")
        return 2
    write(results, out)
    sys.stdout.write(f"{markdown(results)}\nwrote benchmark.json, benchmark.md and benchmark.png to {out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
