"""python -m tests.performance.frame [--rounds 2] [--steps 30] [--long-steps 10] [key=value ...]: the frame's cost.

Whole runs as a user starts them, on Ray and in one process, beside the bare loops with the same tickets and
micro-batches, in turns: at steps of a third of a second of CPU, and at steps of two seconds, which have eight times as
many denoising steps. CPU seconds per step can be read on a busy machine, seconds by the clock on a quiet one only.
`profile.py` has the parts of both pools.
"""

import argparse
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from async_flowrl.benchmark.describe import machine_description
from async_flowrl.benchmark.table import as_sentence, markdown_table
from async_flowrl.config.check import ConfigError
from async_flowrl.config.compose import compose_config
from async_flowrl.plan.arguments import count
from tests.performance.bare_process import AS_IT_IS, AS_WORKERS, BareProcess, Steps
from tests.performance.frame_runs import Run, run
from tests.performance.paired import Progress, spread
from tests.performance.start import medians

PROGRAM = "python -m tests.performance.frame"
COMMON = ("experiment=two_prompts", "monitor.report=false", "evaluate.every=0", "evaluate.before_training=false")
ASYNC, ASYNC_LOCAL, STREAM, STREAM_LOCAL, SYNC_LOCAL = (
    "`one_step_off`, Ray",
    "`one_step_off`, one process",
    "`stream`, Ray",
    "`stream`, one process",
    "`sync`, one process",
)
RUNS = {
    ASYNC: ("--config-name", "one_step_off", "runtime.backend=ray"),
    ASYNC_LOCAL: ("--config-name", "one_step_off", "runtime.backend=local"),
    STREAM: ("--config-name", "stream", "runtime.backend=ray"),
    STREAM_LOCAL: ("--config-name", "stream", "runtime.backend=local"),
    SYNC_LOCAL: ("--config-name", "sync", "runtime.backend=local"),
}
Bare = tuple[int, str]
"""Threads and malloc of a bare loop."""
MALLOCS = (AS_IT_IS, AS_WORKERS)
BARE: tuple[Bare, ...] = tuple((threads, malloc) for malloc in MALLOCS for threads in (1, 2))
LEAST_STEPS = 3
OVER = tuple(f"÷ bare loops, malloc {malloc}" for malloc in MALLOCS)


@dataclass(frozen=True)
class Load:
    """Steps of one length, and how many of them are made."""

    name: str
    overrides: Sequence[str]
    runs: Sequence[str]
    warm_up: int
    steps: int


@dataclass
class Taken:
    """One round of a load."""

    bare: dict[Bare, Steps] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)


def loads(given: argparse.Namespace) -> tuple[Load, Load]:
    long = ("rollout.num_inference_steps=48", *given.overrides)
    return (
        Load("steps of .3 s", given.overrides, tuple(RUNS), warm_up=8, steps=given.steps),
        Load("steps of 2 s", long, (ASYNC, ASYNC_LOCAL, SYNC_LOCAL), warm_up=3, steps=given.long_steps),
    )


def measure(chosen: Sequence[Load], rounds: int) -> dict[str, list[Taken]]:
    """Load → its rounds, which take the loads, the bare loops and the runs in turns."""
    taken: dict[str, list[Taken]] = {load.name: [] for load in chosen}
    progress = Progress()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        loops: dict[str, dict[str, BareProcess]] = {}
        for load in chosen:
            loops[load.name] = {malloc: BareProcess(malloc, [*COMMON, *load.overrides]) for malloc in MALLOCS}
            for process in loops[load.name].values():
                stack.callback(process.close)
        for index in range(rounds):
            for number, load in enumerate(chosen):
                work = folder / f"{index}-{number}"
                taken[load.name].append(one_round(load, loops[load.name], work))
                progress.say(f"{load.name}: round {index + 1} of {rounds}")
    return taken


def one_round(load: Load, loops: dict[str, BareProcess], folder: Path) -> Taken:
    taken = Taken()
    for threads, malloc in BARE:
        taken.bare[threads, malloc] = loops[malloc].measure(threads, max(LEAST_STEPS, load.steps // 2))
    for number, name in enumerate(load.runs):
        directory = folder / str(number)
        directory.mkdir(parents=True)
        overrides = [*RUNS[name], *COMMON, *load.overrides]
        taken.runs[name] = run(overrides, warm_up=load.warm_up, steps=load.steps, directory=directory)
    return taken


Value = Callable[[Taken], float]


def bare_cpu(each: Bare) -> Value:
    return lambda taken: taken.bare[each].cpu


def bare_clock(each: Bare) -> Value:
    return lambda taken: taken.bare[each].clock


def best(malloc: str) -> Value:
    """Seconds by the clock of the fastest bare loop in one process, with this malloc."""
    return lambda taken: min(taken.bare[each].clock for each in BARE if each[1] == malloc)


def cpu(name: str) -> Value:
    return lambda taken: taken.runs[name].cpu


def clock(name: str) -> Value:
    return lambda taken: taken.runs[name].clock


def over(rounds: Sequence[Taken], value: Value, base: Value) -> str:
    """Median, least and most of the ratios of the rounds."""
    return spread([value(taken) / base(taken) for taken in rounds])


def milliseconds(rounds: Sequence[Taken], value: Value) -> str:
    return f"{1e3 * median(map(value, rounds)):.0f}"


def cpu_table(rounds: Sequence[Taken]) -> str:
    """CPU by process; ratios are to the bare loops with one thread."""
    bases = [bare_cpu((1, malloc)) for malloc in MALLOCS]
    rows = [
        (name_of(each), "all", milliseconds(rounds, bare_cpu(each)), *(over(rounds, bare_cpu(each), b) for b in bases))
        for each in BARE
    ]
    for name in rounds[0].runs:
        parts = medians([taken.runs[name].parts for taken in rounds])
        if len(parts) > 1:
            longest = sorted(parts, key=lambda part: -parts[part])
            rows += [(name, part, f"{1e3 * parts[part]:.1f}", "", "") for part in longest]
        ratios = tuple(over(rounds, cpu(name), base) for base in bases)
        rows.append((name, "all", milliseconds(rounds, cpu(name)), *ratios))
    return markdown_table(("run", "process", "CPU ms per step", *OVER), rows)


def clock_table(rounds: Sequence[Taken]) -> str:
    """Steps by the clock; ratios are to the fastest bare loop in one process."""
    bases = [best(malloc) for malloc in MALLOCS]
    timed = {name_of(each): bare_clock(each) for each in BARE}
    timed |= {name: clock(name) for name in rounds[0].runs}
    rows = [
        (name, milliseconds(rounds, value), *(over(rounds, value, base) for base in bases))
        for name, value in timed.items()
    ]
    return markdown_table(("run", "ms per step by the clock", *(f"{each}, the fastest" for each in OVER)), rows)


def goals(short: Sequence[Taken], long: Sequence[Taken]) -> str:
    """The goals, each against bare loops with either malloc."""
    rows = []
    for malloc in MALLOCS:
        one, fastest, what = bare_cpu((1, malloc)), best(malloc), f"malloc {malloc}"
        asked: list[tuple[str, float, Sequence[Taken], Value, Value]] = [
            (f"CPU at .3 s: {ASYNC} ÷ bare, {what}", 1.10, short, cpu(ASYNC), one),
            (f"CPU at .3 s: {ASYNC_LOCAL} ÷ bare, {what}", 1.10, short, cpu(ASYNC_LOCAL), one),
            (f"CPU at .3 s: {SYNC_LOCAL} ÷ bare, {what}", 1.05, short, cpu(SYNC_LOCAL), one),
            (f"CPU at 2 s: {ASYNC} ÷ bare, {what}", 1.03, long, cpu(ASYNC), one),
            (f"CPU at 2 s: {ASYNC_LOCAL} ÷ bare, {what}", 1.03, long, cpu(ASYNC_LOCAL), one),
            (f"clock at .3 s: {ASYNC} ÷ fastest bare, {what}", 1.0, short, clock(ASYNC), fastest),
            (f"clock at .3 s: {ASYNC_LOCAL} ÷ fastest bare, {what}", 1.0, short, clock(ASYNC_LOCAL), fastest),
        ]
        rows += [goal(*each) for each in asked]
    rows.append(goal(f"clock at .3 s: {STREAM} ÷ {ASYNC}", 1.1, short, clock(STREAM), clock(ASYNC)))
    streams = clock(STREAM_LOCAL), clock(ASYNC_LOCAL)
    rows.append(goal(f"clock at .3 s: {STREAM_LOCAL} ÷ {ASYNC_LOCAL}", 1.1, short, *streams))
    return markdown_table(("what", "goal", "measured", "met"), rows)


def goal(what: str, most: float, rounds: Sequence[Taken], value: Value, base: Value) -> tuple[str, str, str, str]:
    met = median(value(taken) / base(taken) for taken in rounds) <= most
    return what, f"≤ {most:g}", over(rounds, value, base), "yes" if met else "**no**"


def name_of(each: Bare) -> str:
    threads, malloc = each
    return f"bare loops, {threads} thread{'s' if threads > 1 else ''}, malloc {malloc}"


def markdown(taken: dict[str, list[Taken]], command: str, description: dict[str, str]) -> str:
    short, long = taken.values()
    parts = [f"    {command}", as_sentence(description)]
    for name, rounds in taken.items():
        parts += [f"{name}, CPU:", cpu_table(rounds), f"{name}, by the clock:", clock_table(rounds)]
    return "\n\n".join([*parts, "Goals:", goals(short, long)]) + "\n"


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
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_intermixed_args()
    chosen = loads(given)
    try:
        for load in chosen:
            compose_config(overrides=[*COMMON, *load.overrides])
    except ConfigError as error:
        parser.error(str(error))
    command = shlex.join([*PROGRAM.split(), *sys.argv[1:]])
    description = machine_description()
    sys.stdout.write(markdown(measure(chosen, given.rounds), command, description))
    return 0


if __name__ == "__main__":
    sys.exit(main())
