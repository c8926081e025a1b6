"""Targets of the benchmark: ratios with a required value, each computed within one repeat.

A bare loop is plain generation or training without any framework (bare.py); `loops.py` measures it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from async_flowrl.benchmark.loops import Loops
from async_flowrl.benchmark.measure import Measured
from async_flowrl.benchmark.variants import BASELINE, IN_TURN, Machine

MIN_STREAM_TICKETS = 8
"""Tickets per worker and step from which the mode `stream` is expected to be faster than `sync`."""
ASYNC, STREAM = "one_step_off", "stream"


@dataclass(frozen=True)
class Round:
    """One repeat: the bare loops and one run of every variant."""

    loops: Loops
    runs: Mapping[str, Measured]

    def in_turn(self) -> Measured | None:
        """Returns the fastest `sync` of this repeat that used all devices in turn; None if none was run."""
        runs = [run for name, run in self.runs.items() if name.startswith(IN_TURN)]
        return min(runs, key=lambda run: run.step_seconds) if runs else None


@dataclass(frozen=True)
class Load:
    """Load of the benchmark; the delays are added on purpose."""

    tickets_per_worker: float
    reward_seconds: float = 0.0
    """Seconds of one step's reward calls, spread evenly over the reward workers."""
    latency: float = 0.0
    """Seconds of one reward call."""
    slow_worker: float = 1.0
    """Factor by which rollout worker 0 takes longer; 1 means none."""


@dataclass(frozen=True)
class Results:
    """All measurements, with the machine and the load."""

    machine: Machine
    rounds: Sequence[Round]
    load: Load
    command: str
    """Command line that repeats the measurement."""
    overrides: Sequence[str] = ()
    description: Mapping[str, str] = field(default_factory=dict)
    """Machine at the time: processor, versions, date, and load by other programs."""

    def generation(self, loops: Loops) -> float:
        """G: seconds of generation per step on all rollout devices together, a slow worker counted by its speed."""
        return loops.generation / (self.machine.rollout - 1 + 1 / self.load.slow_worker)

    def update(self, loops: Loops) -> float:
        """T: seconds of training per step on all trainer devices together."""
        return loops.update / self.machine.trainer

    def bound(self, loops: Loops) -> float:
        """Lower bound of the seconds per step in any mode: max(G, T), or the rewards' seconds if those are more."""
        return max(self.generation(loops), self.update(loops), self.load.reward_seconds)

    def in_turn(self, repeat: Round) -> float:
        """G + T + S: shortest possible synchronous step in seconds; S is the median delivery of a version."""
        return self.generation(repeat.loops) + self.update(repeat.loops) + repeat.runs[BASELINE].publish

    def over(self, ratio: Callable[[Round], float]) -> tuple[float, ...]:
        return tuple(ratio(repeat) for repeat in self.rounds)

    def has(self, *names: str) -> bool:
        return all(name in repeat.runs for name in names for repeat in self.rounds)


@dataclass(frozen=True)
class Target:
    """A ratio with its required value, a minimum or a maximum; `values` has one entry per repeat."""

    key: str
    what: str
    values: tuple[float, ...]
    at_least: float | None = None
    at_most: float | None = None

    @property
    def value(self) -> float:
        """The median over the repeats; `met` compares it with the required value."""
        return median(self.values)

    @property
    def met(self) -> bool:
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )

    @property
    def wanted(self) -> str:
        return f"≥ {self.at_least:g}" if self.at_least is not None else f"≤ {self.at_most:g}"

    @property
    def measured(self) -> str:
        """The median, with the smallest and largest value if there are several."""
        spread = f" ({min(self.values):.3f}-{max(self.values):.3f})" if len(self.values) > 1 else ""
        return f"{self.value:.3f}{spread}"

    def cells(self) -> list[str]:
        return [self.what, self.wanted, self.measured, "yes" if self.met else "**no**"]


def targets(results: Results) -> list[Target]:
    """Returns the targets that the measured variants can be compared with."""
    held_to = of_the_overlap(results) if results.has(ASYNC) else []
    if results.has(BASELINE):
        held_to += against_sync(results)
    if results.has(ASYNC) and results.load.latency > 0 and all(r.in_turn() for r in results.rounds):
        values = results.over(against_in_turn)
        held_to.append(Target("in_turn", "best `sync` shared ÷ `one_step_off`, step time", values, at_least=1.2))
    return held_to


def of_the_overlap(results: Results) -> list[Target]:
    """Targets of one_step_off: its speed relative to the bare loops, and the shares of a step that it loses."""
    over, machine = results.over, results.machine

    def share(of: Callable[[Measured], float]) -> tuple[float, ...]:
        return over(lambda r: of(r.runs[ASYNC]) / r.runs[ASYNC].step_seconds)

    # Seconds of bare loops for the same images, with as many loops as workers, divided by the run's seconds.
    rollout = over(lambda r: r.loops.generation / r.runs[ASYNC].generation)
    update = over(lambda r: r.loops.update / machine.trainer / r.runs[ASYNC].update)
    step = over(lambda r: r.runs[ASYNC].step_seconds / results.bound(r.loops))
    held_to = [Target("step", "`one_step_off` step ÷ max(G,T)", step, at_most=1.05)]
    if results.load.slow_worker == 1:
        held_to.append(Target("rollout", "rollout images/s ÷ bare loop's", rollout, at_least=0.95))
    return [
        *held_to,
        Target("update", "update ÷ bare loop's, rate", update, at_least=0.95),
        Target("trainer_stall", "publish: trainer stall ÷ step", share(lambda run: run.trainer_stall), at_most=0.01),
        Target("worker_stall", "publish: worker stall ÷ step", share(lambda run: run.worker_stall), at_most=0.01),
        Target("controller", "controller CPU ÷ wall clock", over(lambda r: r.runs[ASYNC].controller_cpu), at_most=0.05),
    ]


def against_sync(results: Results) -> list[Target]:
    """Targets of separate `sync` relative to its shortest possible step, and of the other modes relative to `sync`."""
    over = results.over
    sync = over(lambda r: r.runs[BASELINE].step_seconds / results.in_turn(r))
    held_to = [Target("sync", "`sync` separate step ÷ (G+T+S)", sync, at_most=1.05)]
    if results.has(ASYNC):
        gain = over(lambda r: faster(r, ASYNC) * results.bound(r.loops) / results.in_turn(r))
        what = "speed-up over `sync` separate ÷ its ceiling (G+T+S)/max(G,T)"
        held_to.append(Target("speed_up", what, gain, at_least=0.95))
    if results.has(STREAM) and results.load.tickets_per_worker >= MIN_STREAM_TICKETS:
        stream = over(lambda r: faster(r, STREAM))
        held_to.append(Target("stream", "`sync` separate ÷ `stream`, step time", stream, at_least=1.5))
    return held_to


def faster(repeat: Round, name: str) -> float:
    """Speed-up of a variant over separate `sync`: the ratio of their step times."""
    return repeat.runs[BASELINE].step_seconds / repeat.runs[name].step_seconds


def against_in_turn(repeat: Round) -> float:
    """Speed-up of one_step_off over the fastest `sync` that used all devices in turn."""
    best = repeat.in_turn()
    assert best is not None
    return best.step_seconds / repeat.runs[ASYNC].step_seconds
