"""Tables of `frame.py` from its record: CPU by process, seconds by the clock, goals, memory, and threads.

Ratios are those of one round, with the median, the least and the most of all rounds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
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
    """One round of a load: bare loops and runs by their names."""

    bare: dict[str, Steps] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)


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
                {name: Steps(**each) for name, each in taken["bare"].items()},
                {name: Run(**each) for name, each in taken["runs"].items()},
            )
            for taken in record[load]
        ]
        for load in ("short", "long")
    )
    return Record(record["command"], dict(record["description"]), short, long)


Value = Callable[[Taken], float]


def bare_cpu(each: Bare) -> Value:
    return lambda taken: taken.bare[each.name].cpu


def bare_clock(each: Bare) -> Value:
    return lambda taken: taken.bare[each.name].clock


def best(malloc: str) -> Value:
    """Seconds by the clock of the fastest bare loop in one process, with this malloc."""
    return lambda taken: min(taken.bare[each.name].clock for each in BARE if each.malloc == malloc)


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
    """CPU by process; ratios are to the bare loops with as many threads as the run's model, and a run's passes."""
    rows = []
    for each in BARE:
        ratios = (over(rounds, bare_cpu(each), bare_cpu(Bare(each.threads, malloc))) for malloc in MALLOCS)
        rows.append((each.name, "all", milliseconds(rounds, bare_cpu(each)), *ratios))
    for name in rounds[0].runs:
        parts = medians([taken.runs[name].parts for taken in rounds])
        if len(parts) > 1:
            longest = sorted(parts, key=lambda part: -parts[part])
            rows += [(name, part, f"{1e3 * parts[part]:.1f}", "", "") for part in longest]
        bases = (bare_cpu(Bare(THREADS.get(name, 1), malloc)) for malloc in MALLOCS)
        rows.append((name, "all", milliseconds(rounds, cpu(name)), *(over(rounds, cpu(name), base) for base in bases)))
    return markdown_table(("run", "process", "CPU ms per step", *OVER), rows)


def clock_table(rounds: Sequence[Taken]) -> str:
    """Steps by the clock, with ratios to the fastest bare loop in one process, and the peak of memory."""
    rows = [(b.name, bare_clock(b), median(taken.bare[b.name].peak_bytes for taken in rounds)) for b in BARE]
    rows += [(name, clock(name), median(taken.runs[name].peak_bytes for taken in rounds)) for name in rounds[0].runs]
    cells = [
        (name, milliseconds(rounds, value), *(over(rounds, value, best(m)) for m in MALLOCS), f"{peak / 1e9:.2f}")
        for name, value, peak in rows
    ]
    head = ("run", "ms per step by the clock", *(f"{each}, the fastest" for each in OVER), "resident set, GB")
    return markdown_table(head, cells)


def goals(short: Sequence[Taken], long: Sequence[Taken]) -> str:
    """The goals, each against bare loops with either malloc."""
    rows = []
    for malloc in MALLOCS:
        one, two, what = bare_cpu(Bare(1, malloc)), bare_cpu(Bare(2, malloc)), f"malloc {malloc}"
        fastest = best(malloc)
        asked: list[tuple[str, float, Sequence[Taken], Value, Value]] = [
            (f"CPU at .3 s: {ASYNC} ÷ bare, {what}", 1.10, short, cpu(ASYNC), one),
            (f"CPU at .3 s: {ASYNC_LOCAL} ÷ bare, {what}", 1.10, short, cpu(ASYNC_LOCAL), one),
            (f"CPU at .3 s: {SYNC_LOCAL} ÷ bare, {what}", 1.05, short, cpu(SYNC_LOCAL), one),
            (f"CPU at .3 s: {SYNC_THREADS} ÷ bare with 2, {what}", 1.05, short, cpu(SYNC_THREADS), two),
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
