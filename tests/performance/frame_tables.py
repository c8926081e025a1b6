"""Tables of `frame.py` from its record: CPU by process, seconds by the clock, goals, memory, and threads.

Ratios are to bare loops that were made right before and right after a run, because the pace of a machine drifts within
a round. They have the median, the least and the most of all rounds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any

from async_flowrl.benchmark.table import as_sentence, markdown_table
from tests.performance.bare_process import AS_IT_IS, AS_WORKERS, Steps
from tests.performance.frame_runs import Run
from tests.performance.paired import spread
from tests.performance.start import medians

ASYNC, ASYNC_LOCAL, ASYNC_SHARED, STREAM, STREAM_LOCAL, SYNC_LOCAL, SYNC_THREADS, SYNC_SHARED = (
    "`one_step_off`, Ray",
    "`one_step_off`, one process",
    "`one_step_off` shared, 2 processes",
    "`stream`, Ray",
    "`stream`, one process",
    "`sync`, one process",
    "`sync`, one process, 2 threads",
    "`sync` shared, 2 processes",
)
THREADS = {SYNC_THREADS: 2}
"""Threads of a run's model, where they are not 1: its CPU is compared with bare loops of as many."""
MALLOCS = (AS_IT_IS, AS_WORKERS)
OVER = tuple(f"÷ bare loops, malloc {malloc}" for malloc in MALLOCS)


@dataclass(frozen=True)
class Bare:
    """A kind of bare loop."""

    threads: int
    malloc: str
    whole: bool = False
    """Whether the rows of all groups go through one backward pass; else each group has its own, as in a run."""

    @property
    def name(self) -> str:
        loops = "bare, one backward for all rows" if self.whole else "bare loops"
        return f"{loops}, {self.threads} thread{'s' if self.threads > 1 else ''}, malloc {self.malloc}"


BARE = tuple(Bare(threads, malloc, whole) for malloc in MALLOCS for whole in (False, True) for threads in (1, 2))


@dataclass
class Taken:
    """One round of a load: runs and bare loops by their names."""

    runs: dict[str, Run] = field(default_factory=dict)
    around: dict[str, dict[str, Steps]] = field(default_factory=dict)
    """Run → bare loop → its steps right before and right after the run, as one."""

    def bare(self, name: str) -> Steps:
        """Returns the steps of a bare loop in the whole round, as one."""
        return as_one([each[name] for each in self.around.values()])


def as_one(steps: Sequence[Steps]) -> Steps:
    """Returns the mean of several measurements of a bare loop, and the largest peak."""
    cpu, clock = (fmean(getattr(each, name) for each in steps) for name in ("cpu", "clock"))
    return Steps(cpu, clock, max(each.peak_bytes for each in steps))


@dataclass
class Record:
    """All that `frame.py` measures."""

    command: str
    description: dict[str, str]
    short: list[Taken]
    long: list[Taken]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def from_json(record: Mapping[str, Any]) -> Record:
    short, long = (
        [
            Taken(
                {name: Run(**each) for name, each in taken["runs"].items()},
                {
                    name: {bare: Steps(**each) for bare, each in around.items()}
                    for name, around in taken["around"].items()
                },
            )
            for taken in record[load]
        ]
        for load in ("short", "long")
    )
    return Record(record["command"], dict(record["description"]), short, long)


Value = Callable[[Taken], float]


def bare_cpu(each: Bare) -> Value:
    return lambda taken: taken.bare(each.name).cpu


def bare_clock(each: Bare) -> Value:
    return lambda taken: taken.bare(each.name).clock


def cpu_around(name: str, each: Bare) -> Value:
    """CPU seconds of a bare loop right before and after a run."""
    return lambda taken: taken.around[name][each.name].cpu


def best(malloc: str, name: str | None = None) -> Value:
    """Seconds by the clock of the fastest bare loop in one process, with this malloc; those around a run if named."""
    kinds = [each.name for each in BARE if each.malloc == malloc]
    if name is None:
        return lambda taken: min(taken.bare(kind).clock for kind in kinds)
    return lambda taken: min(taken.around[name][kind].clock for kind in kinds)


def cpu(name: str) -> Value:
    return lambda taken: taken.runs[name].cpu


def clock(name: str) -> Value:
    return lambda taken: taken.runs[name].clock


def paced(name: str) -> Value:
    """Seconds of a run by the clock in those of the fastest bare loop around it."""
    return lambda taken: clock(name)(taken) / best(AS_WORKERS, name)(taken)


def over(rounds: Sequence[Taken], value: Value, base: Value) -> str:
    """Median, least and most of the ratios of the rounds."""
    return spread([value(taken) / base(taken) for taken in rounds])


def milliseconds(rounds: Sequence[Taken], value: Value) -> str:
    return f"{1e3 * median(map(value, rounds)):.0f}"


def cpu_table(rounds: Sequence[Taken]) -> str:
    """CPU by process; ratios are to the bare loops with as many threads as the run's model, and a run's passes."""
    rows = []
    for each in BARE:
        ratios = (over(rounds, bare_cpu(each), bare_cpu(Bare(each.threads, malloc))) for malloc in MALLOCS)
        rows.append((each.name, "all", milliseconds(rounds, bare_cpu(each)), *ratios))
    for name in rounds[0].runs:
        parts = medians([taken.runs[name].parts for taken in rounds])
        if len(parts) > 1:
            longest = sorted(parts, key=lambda part: -parts[part])
            shown = [(part, cell) for part in longest if (cell := f"{1e3 * parts[part]:.1f}") != "0.0"]
            rows += [(name, part, cell, "", "") for part, cell in shown]
        bases = (cpu_around(name, Bare(THREADS.get(name, 1), malloc)) for malloc in MALLOCS)
        rows.append((name, "all", milliseconds(rounds, cpu(name)), *(over(rounds, cpu(name), base) for base in bases)))
    return markdown_table(("run", "process", "CPU ms per step", *OVER), rows)


def clock_table(rounds: Sequence[Taken]) -> str:
    """Steps by the clock, with ratios to the fastest bare loop in one process, and the peak of memory."""
    rows: list[tuple[str, Value, float, str | None]] = []
    rows += [(b.name, bare_clock(b), median(taken.bare(b.name).peak_bytes for taken in rounds), None) for b in BARE]
    for name in rounds[0].runs:
        rows.append((name, clock(name), median(taken.runs[name].peak_bytes for taken in rounds), name))
    cells = [
        (name, milliseconds(rounds, value), *(over(rounds, value, best(m, at)) for m in MALLOCS), f"{peak / 1e9:.2f}")
        for name, value, peak, at in rows
    ]
    head = ("run", "ms per step by the clock", *(f"{each}, the fastest" for each in OVER), "resident set, GB")
    return markdown_table(head, cells)


def goals(short: Sequence[Taken], long: Sequence[Taken]) -> str:
    """The goals, each against bare loops with either malloc."""
    rows = []
    for malloc in MALLOCS:
        cpu_asked: list[tuple[str, str, float, Sequence[Taken]]] = [
            (".3 s", ASYNC, 1.10, short),
            (".3 s", ASYNC_LOCAL, 1.10, short),
            (".3 s", SYNC_LOCAL, 1.05, short),
            (".3 s", SYNC_THREADS, 1.05, short),
            ("2 s", ASYNC, 1.03, long),
            ("2 s", ASYNC_LOCAL, 1.03, long),
        ]
        for step, name, most, rounds in cpu_asked:
            threads = THREADS.get(name, 1)
            what = f"CPU at {step}: {name} ÷ bare{f' with {threads}' if threads > 1 else ''}, malloc {malloc}"
            rows.append(goal(what, most, rounds, cpu(name), cpu_around(name, Bare(threads, malloc))))
        for name in (ASYNC, ASYNC_LOCAL):
            what = f"clock at .3 s: {name} ÷ fastest bare, malloc {malloc}"
            rows.append(goal(what, 1.0, short, clock(name), best(malloc, name)))
    for one, other in ((STREAM, ASYNC), (STREAM_LOCAL, ASYNC_LOCAL)):
        rows.append(goal(f"clock at .3 s: {one} ÷ {other}, each ÷ its bare", 1.1, short, paced(one), paced(other)))
    return markdown_table(("what", "goal", "measured", "met"), rows)


def goal(what: str, most: float, rounds: Sequence[Taken], value: Value, base: Value) -> tuple[str, str, str, str]:
    met = median(value(taken) / base(taken) for taken in rounds) <= most
    return what, f"≤ {most:g}", over(rounds, value, base), "yes" if met else "**no**"


def threads_table(short: Sequence[Taken]) -> str:
    """CPU of `one_step_off` on Ray by process: its busiest thread, and all others together."""
    busiest, others = (
        medians([{part: pair[at] for part, pair in taken.runs[ASYNC].threads.items()} for taken in short])
        for at in (0, 1)
    )
    rows = [
        (part, f"{1e3 * busiest[part]:.1f}", f"{1e3 * others[part]:.1f}")
        for part in sorted(busiest, key=lambda part: -busiest[part])
    ]
    return markdown_table(("process", "its busiest thread, CPU ms per step", "all its other threads"), rows)


def markdown(record: Record) -> str:
    parts = [f"    {record.command}", as_sentence(record.description)]
    for name, rounds in (("Steps of .3 s", record.short), ("Steps of 2 s", record.long)):
        parts += [f"{name}, CPU:", cpu_table(rounds), f"{name}, by the clock:", clock_table(rounds)]
    return "\n\n".join([*parts, "Goals:", goals(record.short, record.long)]) + "\n"


def threads_markdown(record: Record) -> str:
    command = f"    {record.command}"
    return "\n\n".join([command, as_sentence(record.description), threads_table(record.short)]) + "\n"
