"""Schedules of faults in runs with `placement=shared`, each drawn from a seed.

Whole controllers run, with real checkpoints and ledgers, so that all processes start again when one dies.
`python -m tests.chaos shared_schedules FIRST LAST` runs a range of seeds and prints what was hit.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_flowrl.config.schema import Config
from async_flowrl.controller.endpoints import SenderLate
from async_flowrl.observability.events import read_events
from tests.chaos.fault_schedules import HORIZON_SECONDS, Ended, random_timing
from tests.chaos.recovery_schedules import AVERAGES, Left, check_left, scratch, undisturbed
from tests.support.toy_pool import Timing, World
from tests.support.toy_recovery import Groups, Outside, events, rollbacks, run_controller, summary
from tests.support.toy_shared import ToySharedPool, shared_config, shared_toys

STEPS = 6
METHODS: dict[str, frozenset[str]] = {
    "samples": frozenset({"generate"}),
    "samples an evaluation": frozenset({"generate/evaluation"}),
    "trains": frozenset({"train"}),
    "ends a step": frozenset({"add_up", "take_step"}),
    "announces a version": frozenset({"stage", "seal"}),
    "keeps a version": frozenset({"keep_local"}),
    "proves itself": frozenset({"receive", "prove"}),
    "writes a checkpoint": frozenset({"snapshot", "save"}),
    "newcomer loads": frozenset({"load"}),
    "newcomer takes over": frozenset({"take_over", "restore"}),
    "gives its state": frozenset({"kept_state"}),
}
"""Place → the calls that are meant."""
CALLS = {
    "samples": 20,
    "samples an evaluation": 4,
    "trains": 5,
    "ends a step": 5,
    "announces a version": 10,
    "keeps a version": 5,
    "proves itself": 2,
    "writes a checkpoint": 4,
    "newcomer loads": 2,
    "newcomer takes over": 1,
    "gives its state": 5,
}
"""How many calls of each kind every run makes at least: a fault is placed at one of them."""
OF_NEWCOMERS = frozenset({"newcomer loads", "newcomer takes over"})
"""Places that only exist where a process has died before."""
IN_A_CALL = ("kill", "hang", "delay")
CELLS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(METHODS, IN_A_CALL),
    "samples": (*IN_A_CALL, "slow"),
    "any moment": ("kill", "stop"),
    "all at once": ("kill",),
    "controller": ("kill",),
}
"""Place → what can go wrong there. "delay" is within every deadline, "slow" is 100 times too slow, "stop" is a process
that is there and never answers again."""
PAIRS = [(place, fault) for place, faults in CELLS.items() for fault in faults]
MODES = [(hand_over, k, processes) for hand_over in ("batch", "stream") for k in range(4) for processes in (1, 2, 3)]
"""Hand-over, `max_staleness` and number of processes: `sync`, `stream`, `one_step_off` and `fully_async` are in it."""
PER_CELL = 24
"""Seeds of each cell: every mode once."""
BESIDE: tuple[tuple[str, str], ...] = (
    ("samples", "kill"),
    ("samples", "hang"),
    ("samples", "delay"),
    ("samples", "lose-images"),
    ("samples", "lose-trajectory"),
    ("trains", "delay"),
    ("keeps a version", "kill"),
    ("reward", "kill"),
    ("reward", "hang"),
    ("reward", "nan"),
)
"""What may happen in the same run, and must leave no trace."""


def ends_by_name(place: str, fault: str) -> bool:
    """Whether it must end the run by name, unless the process that hangs dies of something else meanwhile."""
    if fault != "hang":
        return False
    at_work = "trains", "ends a step", "announces a version", "writes a checkpoint", "gives its state"
    return place in at_work or place in OF_NEWCOMERS


@dataclass
class SharedSchedule:
    """What happens to a run until it ends."""

    seed: int
    config: Config
    timing: Timing
    processes: list[int]
    """How many there are under each controller."""
    calls: dict[tuple[str, int], str] = field(default_factory=dict)
    """(place, n-th of its calls in the whole pool) → fault."""
    timed: tuple[float, str, str] | None = None
    """(virtual second, place, fault) of one that does not sit in a call."""
    seen: Counter[str] = field(default_factory=Counter)
    hits: list[tuple[str, str]] = field(default_factory=list)
    pools: list[ToySharedPool] = field(default_factory=list)
    """Of each controller."""

    def fault(self, worker: str, method: str, number: int) -> str | None:
        found = None
        for place in places_of(worker, method):
            self.seen[place] += 1
            if found is None and (fault := self.calls.get((place, self.seen[place]))) is not None:
                self.hits.append((place, fault))
                found = fault
        return found

    async def disturb(self, outside: Outside, groups: Groups) -> None:
        pool: Any = groups["shared"]
        self.pools.append(pool)
        if self.timed is None:
            return
        (when, place, fault), self.timed = self.timed, None
        await asyncio.sleep(when)
        self.hits.append((place, fault))
        if place == "controller":
            outside.kill()
            return
        living = [worker for worker in pool.workers if not worker.dead.is_set()]
        chosen = living if place == "all at once" else living[:1] if self.seed % 2 else living[-1:]
        for worker in chosen:
            worker.stopped = fault == "stop"
            if fault == "kill":
                worker.kill()


def places_of(worker: str, method: str) -> list[str]:
    """The places that a call is at."""
    if worker.startswith("reward"):
        return ["reward"] if method == "score" else []
    found = [place for place, methods in METHODS.items() if method in methods]
    if "." not in worker:
        found = [place for place in found if place not in ("newcomer loads", "newcomer takes over")]
    return found


def has_averages(seed: int) -> bool:
    """Whether the run has an EMA and an old policy: of two seeds of one cell that follow each other, one has."""
    return (seed + seed // len(PAIRS)) % 2 == 1


def make_schedule(seed: int) -> SharedSchedule:
    """One fault of the cell that it is this seed's turn to hit, in the mode whose turn it is, and perhaps another."""
    rng = random.Random(f"shared {seed}")
    (place, fault), (hand_over, k, processes) = PAIRS[seed % len(PAIRS)], MODES[seed // len(PAIRS) % len(MODES)]
    averaged = AVERAGES if has_averages(seed) else {}
    evaluated = 2 if "evaluation" in place else rng.choice([0, 2, 3])
    config = shared_config(
        k,
        processes,
        hand_over=hand_over,
        steps=STEPS,
        reward__num_workers=rng.choice([1, 2]),
        evaluate__every=evaluated,
        evaluate__before_training=bool(evaluated) and rng.choice([False, True]),
        save__every=rng.choice([1, 2]),
        resume="auto",
        console="quiet",
        **averaged,
    )
    numbers = [processes, *(rng.choice([1, 2, 3]) for _ in range(2))] if place == "controller" else [processes]
    schedule = SharedSchedule(seed, config, random_timing(seed, rng), numbers)
    if place in ("any moment", "all at once", "controller"):
        schedule.timed = (rng.uniform(0.5, 12.0), place, fault)
    else:
        schedule.calls[place, rng.randint(1, CALLS[place])] = fault
    if place in OF_NEWCOMERS:
        schedule.calls["samples", rng.randint(1, 6)] = "kill"
    elif rng.random() < 0.5:
        where, what = rng.choice(BESIDE)
        schedule.calls.setdefault((where, rng.randint(1, CALLS.get(where, 20))), what)
    return schedule


def run_schedule(schedule: SharedSchedule, root: Path) -> Path:
    """Controllers one after the other until one ends by itself; returns the folder of the last."""
    config = schedule.config
    for processes in schedule.processes:
        config.trainer.num_workers = config.rollout.num_workers = processes
        world = World(schedule.timing, schedule.fault)
        killed = run_controller(config, root, world, disturb=schedule.disturb, horizon=HORIZON_SECONDS)
        if killed is None:
            return root
        root = killed
    raise AssertionError("it never ended")


def outcome(seed: int) -> Ended:
    """Runs the schedule of a seed to its end."""
    schedule = make_schedule(seed)
    expected = undisturbed(schedule.config.max_staleness, averaged=has_averages(seed))
    wrong, how = None, "success"
    with scratch() as folder, shared_toys():
        try:
            root = run_schedule(schedule, folder / "run")
            check(root, schedule, expected)
        except (TimeoutError, SenderLate) as error:
            how, wrong = type(error).__name__, named(schedule, error)
        except Exception as error:
            how, wrong = type(error).__name__, f"{type(error).__name__}: {error}"
    return Ended(seed, how, tuple(schedule.hits), 0.0, wrong)


def named(schedule: SharedSchedule, error: TimeoutError | SenderLate) -> str | None:
    """What is wrong with a run that ended by name, if anything."""
    if not any(ends_by_name(*hit) or hit[1] == "stop" for hit in schedule.hits):
        return f"ended by {error!r} though everything in it can be recovered from"
    return None if "deadline" in str(error) else f"its error names no deadline: {error!r}"


def check(root: Path, schedule: SharedSchedule, expected: Left) -> None:
    """The weights, logged rewards and tickets of an undisturbed run in separate pools, each ticket trained once."""
    assert summary(root)["steps"] == STEPS
    check_left(root, schedule.config, expected)
    hits = [hit for hit in schedule.hits if ends_by_name(*hit)]
    assert not hits or len(schedule.hits) > 1, f"{hits} should have ended the run"
    if len(schedule.processes) == 1:
        check_returns(root, schedule.pools[0])
    if schedule.hits and {fault for _, fault in schedule.hits} == {"delay"}:
        assert events(root, "fault") == [], "a delay costs nobody's place"


def check_returns(root: Path, pool: ToySharedPool) -> None:
    """All processes start again when one has died, and only then, with one of the two newest states."""
    everybody: list[Any] = pool.everybody
    newest, died = 0, False
    for event in read_events(root / "events.jsonl"):
        if event["event"] == "fault":
            died |= event["worker"].startswith("trainer")
        elif event["event"] == "step":
            newest = event["step"] + 1
        elif event["event"] == "rollback":
            step = event["step"]
            assert died, f"nobody has died, and it went back to {step}"
            assert newest - 1 <= step <= newest, f"{newest} steps were trained, it went back to {step}"
            newest, died = step, False
    assert (len(everybody) > len(pool.workers)) == bool(rollbacks(root))
