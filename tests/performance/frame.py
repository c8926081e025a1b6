"""python -m tests.performance.frame [--rounds 2] [--steps 30] [--long-steps 10] [--json FILE] [key=value ...].

It measures the frame's cost: whole runs as a user starts them, on Ray and in one process, and before and after each the
bare loops with the same tickets and micro-batches (and with one backward pass for all rows): at steps of a third of a
second of CPU, and at steps of two seconds, which have eight times as many denoising steps. CPU seconds per step can be
read on a busy machine, seconds by the clock on a quiet one only. `--json` keeps everything, after each round, for
`docs/write_benchmarks.py`. `profile.py` has the parts of both pools.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from async_flowrl.benchmark.describe import machine_description
from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import compose_config
from async_flowrl.plan.arguments import count
from tests.performance.bare_process import BareProcess, Steps
from tests.performance.frame_runs import run
from tests.performance.frame_tables import (
    ASYNC,
    ASYNC_LOCAL,
    ASYNC_SHARED,
    BARE,
    STREAM,
    STREAM_LOCAL,
    SYNC_LOCAL,
    SYNC_SHARED,
    SYNC_THREADS,
    Record,
    Taken,
    as_one,
    markdown,
    threads_markdown,
)
from tests.performance.paired import Progress

PROGRAM = "python -m tests.performance.frame"
COMMON = ("experiment=two_prompts", "monitor.report=false", "evaluate.every=0", "evaluate.before_training=false")
RAY, LOCAL = "runtime.backend=ray", "runtime.backend=local"
TWO = ("placement=shared", "rollout.num_workers=2", "trainer.num_workers=2")
RUNS = {
    ASYNC: ("--config-name", "one_step_off", RAY),
    ASYNC_LOCAL: ("--config-name", "one_step_off", LOCAL),
    ASYNC_SHARED: ("--config-name", "one_step_off", RAY, *TWO),
    STREAM: ("--config-name", "stream", RAY),
    STREAM_LOCAL: ("--config-name", "stream", LOCAL),
    SYNC_LOCAL: ("--config-name", "sync", LOCAL),
    SYNC_THREADS: ("--config-name", "sync", LOCAL, "rollout.threads=2", "trainer.threads=2"),
    SYNC_SHARED: ("--config-name", "sync", RAY, *TWO),
}
LEAST_STEPS = 3
Loops = dict[tuple[str, bool], BareProcess]
"""(malloc, one backward for all rows) → its process."""


@dataclass(frozen=True)
class Load:
    """Steps of one length, and how many of them are made."""

    name: str
    overrides: Sequence[str]
    runs: Sequence[str]
    warm_up: int
    steps: int
    bare_steps: int
    """Steps of each bare loop before and after a run."""


def loads(given: argparse.Namespace) -> tuple[Load, Load]:
    long = ("rollout.num_inference_steps=48", *given.overrides)
    return (
        Load("steps of .3 s", given.overrides, tuple(RUNS), warm_up=8, steps=given.steps, bare_steps=4),
        Load("steps of 2 s", long, (ASYNC, ASYNC_LOCAL, SYNC_LOCAL), warm_up=3, steps=given.long_steps, bare_steps=1),
    )


def measure(record: Record, chosen: tuple[Load, Load], rounds: int, out: Path | None) -> None:
    """Adds the rounds to the record; they take the loads, the bare loops and the runs in turns."""
    progress = Progress()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        loops: list[Loops] = [{}, {}]
        for each, load in zip(loops, chosen, strict=True):
            for malloc, whole in {(bare.malloc, bare.whole): None for bare in BARE}:
                process = BareProcess(malloc, [*COMMON, *load.overrides], whole=whole)
                each[malloc, whole] = process
                stack.callback(process.close)
        for index in range(rounds):
            for number, (load, taken) in enumerate(zip(chosen, (record.short, record.long), strict=True)):
                taken.append(one_round(load, loops[number], folder / f"{index}-{number}"))
                progress.say(f"{load.name}: round {index + 1} of {rounds}")
            if out is not None:
                out.write_text(json.dumps(record.as_json(), indent=1) + "\n")


def one_round(load: Load, loops: Loops, folder: Path) -> Taken:
    """Makes every run, with steps of all bare loops before the first and after each."""
    taken, before = Taken(), bare_steps(load, loops)
    for number, name in enumerate(load.runs):
        directory = folder / str(number)
        directory.mkdir(parents=True)
        overrides = [*RUNS[name], *COMMON, *load.overrides]
        taken.runs[name] = run(overrides, warm_up=load.warm_up, steps=load.steps, directory=directory)
        after = bare_steps(load, loops)
        taken.around[name] = {kind: as_one([before[kind], after[kind]]) for kind in before}
        before = after
    return taken


def bare_steps(load: Load, loops: Loops) -> dict[str, Steps]:
    return {bare.name: loops[bare.malloc, bare.whole].measure(bare.threads, load.bare_steps) for bare in BARE}


def several(value: str) -> int:
    """Parses a number of steps. With fewer than LEAST_STEPS, two looks at a run could see the same step."""
    steps = count(value)
    if steps < LEAST_STEPS:
        raise argparse.ArgumentTypeError(f"{value} is less than {LEAST_STEPS}")
    return steps


def main() -> int:
    parser = argparse.ArgumentParser(prog=PROGRAM)
    parser.add_argument("--rounds", type=count, default=2)
    parser.add_argument("--steps", type=several, default=30)
    parser.add_argument("--long-steps", type=several, default=10)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where all that was measured is written")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_intermixed_args()
    chosen = loads(given)
    try:
        for load in chosen:
            compose_config(overrides=[*COMMON, *load.overrides])
    except ConfigError as error:
        parser.error(str(error))
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
    record = Record(shlex.join([*PROGRAM.split(), *sys.argv[1:]]), machine_description(), [], [])
    measure(record, chosen, given.rounds, given.json)
    sys.stdout.write(f"{markdown(record)}\n{threads_markdown(record)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
