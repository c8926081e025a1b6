"""Schedules of faults, each drawn from a seed: the place and kind of each fault, and the end that the run must have.

`python -m tests.chaos fault_schedules FIRST LAST` runs a range of seeds and prints what was hit.
"""

import asyncio
import functools
import math
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from async_flowrl.config.schema import Config
from async_flowrl.controller.context import Context
from async_flowrl.controller.dispatch import TicketLost
from async_flowrl.controller.endpoints import SenderLate
from async_flowrl.tickets.table import State
from separation.group import WorkerDied, WorkerFailed
from separation.supervise import DeadlineExceeded
from tests.support.run_checks import STEPS, check_bound, check_evaluation, check_once, check_watermarks
from tests.support.toy import ToyRun, calm_run, toy_config, virtual
from tests.support.toy_pool import ListObserver, Timing, ToyPool

NAMED = (WorkerDied, WorkerFailed, DeadlineExceeded, SenderLate, TicketLost, TimeoutError)
HORIZON_SECONDS = 3000.0
"""Virtual time in which every schedule has ended; an undisturbed run takes 30 to 60 seconds."""
UPDATE = ("trainer:add_up",)
PUBLISH = ("trainer:stage", "trainer:seal", "trainer:payload")

PHASES = {**dict.fromkeys(UPDATE, "update"), **dict.fromkeys(PUBLISH, "publish")}
"""The trainer's methods → place of the matrix."""

CELLS: dict[str, tuple[str, ...]] = {
    "rollout:generate": ("kill", "hang", "slow", "lose-images", "lose-trajectory", "raise", "drain"),
    "rollout:generate/evaluation": ("kill", "hang", "slow", "lose-images"),
    "rollout:receive": ("kill", "hang", "slow", "corrupt", "truncate", "drain"),
    "rollout:load": ("kill", "hang", "drain"),
    "rollout:prove": ("kill", "hang", "drain"),
    "rollout:idle": ("kill",),
    "rollout:all": ("kill",),
    "nodes": ("join", "leave", "leave-late", "end"),
    "ready": ("lose",),
    "reward:score": ("kill", "hang", "slow", "raise", "nan", "count"),
    "update": ("kill", "hang", "raise", "slow"),
    "publish": ("kill", "hang", "raise", "slow"),
}
"""Place → what can go wrong there. `update` and `publish` stand for the trainer's methods of that phase."""
PAIRS = [(place, fault) for place, faults in CELLS.items() for fault in faults]
SIZES = {("nodes", fault) for fault in CELLS["nodes"]} | {pair for pair in PAIRS if pair[1] == "drain"}
"""What happens to a pool whose size may change; where it loses a node, another one comes some time later."""
CALLS = {
    "rollout:generate": 20,
    "rollout:generate/evaluation": 6,
    "rollout:receive": 12,
    "rollout:load": 1,
    "rollout:prove": 4,
    "reward:score": 20,
    "trainer:add_up": 5,
    "trainer:stage": 5,
    "trainer:seal": 5,
    "trainer:payload": 5,
}
"""How many calls of each kind every run makes at least: a fault is placed at one of them."""


def fatal(place: str, fault: str) -> bool:
    """Whether it must, or (a slow trainer) may, end the run by name. Everything else must leave no trace."""
    return place in ("update", "publish") or (place, fault) == ("rollout:generate", "raise")


@dataclass
class Schedule:
    """The faults of one run: the `fault` and the `disturb` of its pools, which count what they do."""

    seed: int
    config: Config
    timing: Timing
    calls: dict[tuple[str, int], tuple[str, str]] = field(default_factory=dict)
    """(pool:method, n-th call of the whole pool) → (place, fault)."""
    timed: list[tuple[float, tuple[str, str]]] = field(default_factory=list)
    """Virtual second → place and kind of a fault that does not sit in a call."""
    rollout: ToyPool | None = None
    seen: Counter[str] = field(default_factory=Counter)
    hits: list[tuple[str, str]] = field(default_factory=list)
    """What has taken place, without exceptions (`all_hits`)."""

    def fault(self, worker: str, method: str, number: int) -> str | None:
        key = f"{worker.split('-')[0]}:{method}"
        self.seen[key] += 1
        hit = self.calls.get((key, self.seen[key]))
        if hit is not None and hit[1] == "drain" and not self.drain(worker):
            return None
        if hit is not None and hit[1] != "raise":
            self.hits.append(hit)
        return hit[1] if hit and hit[1] != "drain" else None

    def all_hits(self, observer: ListObserver) -> tuple[tuple[str, str], ...]:
        """Returns `hits` and the exceptions that were raised; a call that its worker's death ends raises none."""
        raised = observer.of("injected", fault="raise")
        calls = [f"{event['worker'].split('-')[0]}:{event['method']}" for event in raised]
        return (*self.hits, *((PHASES.get(call, call), "raise") for call in calls))

    def drain(self, name: str) -> bool:
        """Has the node of a worker drained that is in the pool or on its way in, now and then with a deadline."""
        rollout = self.rollout
        worker = next((one for one in rollout.everybody if one.name == name), None) if rollout else None
        if rollout is None or worker is None or worker.dead.is_set():
            return False
        rng = random.Random(f"{self.seed}/{name}")
        rollout.growth.drain(worker, rng.choice([math.inf, 0.4, 3.0]))
        self.another(rollout, rng)
        return True

    def another(self, rollout: ToyPool, rng: random.Random) -> None:
        """A node comes in place of one that goes."""
        asyncio.get_running_loop().call_later(rng.uniform(0.2, 15.0), rollout.growth.arrive)

    async def disturb(self, ctx: Context, groups: Mapping[str, ToyPool]) -> None:
        self.rollout = groups["rollout"]
        for when, (place, fault) in sorted(self.timed):
            await asyncio.sleep(max(0.0, when - ctx.observer.now()))
            while not self.apply(place, fault, ctx, groups["rollout"]):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    def resize(self, fault: str, rollout: ToyPool) -> bool:
        """A node comes, is drained with or without a deadline, or ends; the worker on it is any that lives."""
        rng = random.Random(f"{self.seed}/{fault}")
        alive = [worker for worker in rollout.workers if not worker.dead.is_set()]
        if fault != "join" and not alive:
            return False
        self.hits.append(("nodes", fault))
        if fault == "join":
            rollout.growth.arrive()
            return True
        self.another(rollout, rng)
        if fault == "end":
            rollout.growth.end(rng.choice(alive))
        else:
            rollout.growth.drain(rng.choice(alive), rng.uniform(0.0, 1.0) if fault == "leave-late" else math.inf)
        return True

    def apply(self, place: str, fault: str, ctx: Context, rollout: ToyPool) -> bool:
        """Does it if it can be done now."""
        if place == "nodes":
            return self.resize(fault, rollout)
        if place == "rollout:all":
            for worker in rollout.workers:
                worker.kill()
            self.hits.append((place, "kill"))
            return True
        if place == "ready":
            ready = [t for t in ctx.table.live() if t.state is State.READY and t.payload[1].value is not None]
            if ready:
                ready[0].payload[1].lost = True
                self.hits.append((place, "lose"))
            return bool(ready)
        idle = [worker for worker in rollout.workers if not worker.running and not worker.dead.is_set()]
        if idle:
            idle[0].kill()
            self.hits.append((place, "kill"))
        return bool(idle)


def make_schedule(seed: int) -> Schedule:
    """Faults for a random configuration: one of the cell that it is this seed's turn to hit, and up to two others."""
    rng = random.Random(seed)
    place, fault = PAIRS[seed % len(PAIRS)]
    config = toy_config(
        rng.choice([0, 1, 1, 2, 3]),
        hand_over=rng.choice(["batch", "stream"]),
        steps=STEPS,
        rollout__num_workers=rng.choice([1, 2, 3, 4]),
        reward__num_workers=rng.choice([1, 2]),
        ticket_size=rng.choice([None, None, 2]),
        evaluate__every=2 if "evaluation" in place else rng.choice([0, 2, 3]),
        deadlines__publish=8.0,
    )
    schedule = Schedule(seed, config, random_timing(seed, rng))
    place_fault(schedule, place, fault, rng)
    for _ in range(rng.choice([0, 1, 1, 2, 2])):
        place_fault(schedule, *rng.choice([pair for pair in PAIRS if not fatal(*pair)]), rng)
    if SIZES & {*schedule.calls.values(), *(what for _, what in schedule.timed)}:
        config.rollout.min_workers, config.rollout.max_workers = 1, config.rollout.num_workers + 2
    return schedule


def random_timing(seed: int, rng: random.Random) -> Timing:
    return Timing(
        seed=seed,
        spread=rng.choice([0.0, 0.5, 0.95]),
        generate=rng.choice([0.3, 1.0, 2.0]),
        update=rng.choice([0.2, 1.0, 2.0]),
        transfer=rng.choice([0.05, 1.0]),
    )


def place_fault(schedule: Schedule, place: str, fault: str, rng: random.Random) -> None:
    if place in ("rollout:idle", "rollout:all", "ready", "nodes"):
        schedule.timed.append((rng.uniform(0.5, 12.0), (place, fault)))
        return
    method = rng.choice({"update": UPDATE, "publish": PUBLISH}.get(place, (place,)))
    schedule.calls[method, rng.randint(1, CALLS[method])] = (place, fault)
    if place == "rollout:load":
        # There is something to load only where something died.
        schedule.calls["rollout:generate", rng.randint(1, 6)] = ("rollout:generate", "kill")


@dataclass(frozen=True)
class Ended:
    """How a schedule ended. `wrong` says what it did that it must not do, if anything."""

    seed: int
    how: str
    hits: tuple[tuple[str, str], ...]
    seconds: float
    wrong: str | None


@functools.cache
def outcome(seed: int) -> Ended:
    """Runs the schedule of a seed to its end."""
    schedule, observer = make_schedule(seed), ListObserver()
    wrong: str | None = None
    try:
        run = virtual(
            schedule.config,
            schedule.timing,
            schedule.fault,
            horizon=HORIZON_SECONDS,
            disturb=schedule.disturb,
            observer=observer,
        )
        how = "success"
        check_success(run, schedule.config)
    except NAMED as error:
        how = type(error).__name__
        if not any(fatal(*hit) for hit in schedule.all_hits(observer)):
            wrong = f"ended by {error!r} though everything in it can be recovered from"
        elif not any(pool in str(error) for pool in ("trainer", "Trainer", "rollout", "update", "publish")):
            wrong = f"its error names nobody: {error!r}"
    except Exception as error:
        how, wrong = type(error).__name__, f"{type(error).__name__}: {error}"
    last = observer.events[-1]["time"] if observer.events else 0.0
    return Ended(seed, how, schedule.all_hits(observer), last, wrong)


def check_success(run: ToyRun, config: Config) -> None:
    k, every = config.max_staleness, config.evaluate.every
    assert run.digest == calm_run(toy_config(k, steps=STEPS)).digest
    check_bound(run, k)
    check_once(run)
    check_watermarks(run)
    check_evaluation(run, list(range(every, STEPS + 1, every)) if every else [])
    assert sum(run.table.counts().values()) == run.table.issued


def coverage(ended: list[Ended]) -> Counter[tuple[str, str]]:
    return Counter(hit for each in ended for hit in each.hits)
