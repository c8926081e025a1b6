"""Schedules of events that end an attempt: deaths of trainer ranks and of controllers, and unusable checkpoints.

`python -m tests.chaos recovery_schedules FIRST LAST` runs a range of seeds and prints what was hit.
"""

import asyncio
import functools
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_flowrl.cli.verify import verify
from async_flowrl.config.curves import evaluation_due
from async_flowrl.config.schema import Config, LimitsConfig
from async_flowrl.controller.checkpoints import SaveFailed
from async_flowrl.training.checkpoint import written
from separation.supervise import DeadlineExceeded
from tests.chaos.fault_schedules import CALLS, HORIZON_SECONDS, PUBLISH, SIZES, UPDATE, Ended, random_timing
from tests.chaos.fault_schedules import PAIRS as WORKER_PAIRS
from tests.chaos.fault_schedules import fatal as fatal_to_worker
from tests.support.toy import toy_config
from tests.support.toy_pool import Timing, World
from tests.support.toy_recovery import Groups, Outside, evaluations, logged, rollbacks, run_controller, summary

STEPS = 6
CELLS: dict[str, tuple[str, ...]] = {
    "trainer: update": ("kill",),
    "trainer: publish": ("kill",),
    "trainer: snapshot": ("kill", "hang"),
    "trainer: writes a checkpoint": ("kill", "hang", "torn", "full", "full for good"),
    "trainer: comes back": ("kill", "hang"),
    "rollout: forgets": ("kill", "hang"),
    "controller": ("kill", "kill twice", "torn", "stop"),
    "newest checkpoint": ("flip", "truncate", "remove"),
}
"""Place → what can go wrong there. "torn": death inside the writing of a checkpoint, the trainer's or everybody's."""
PAIRS = [(place, fault) for place, faults in CELLS.items() for fault in faults]
BESIDE = [
    pair
    for pair in WORKER_PAIRS
    if not fatal_to_worker(*pair) and pair[0] not in ("rollout:load", "ready", "update") and pair not in SIZES
]
"""Faults of workers that may happen in the same run. Pools keep their size: nothing of `SIZES` happens to them."""
AVERAGES: dict[str, Any] = {
    "trainer__ema_decay": 0.9,
    "algorithm__name": "diffusion_nft",
    "algorithm__sde_type": "ode",
    "algorithm__old_policy_decay": "half",
}
"""Settings with which evaluations use an EMA, and images are made with an old policy."""
NAMED = (SaveFailed, DeadlineExceeded)


def fatal(place: str, fault: str) -> bool:
    return fault == "full for good" or (place.startswith("trainer") and fault == "hang")


@dataclass
class RecoverySchedule:
    """What happens to a run until it ends: faults in calls, and the ends of its controllers, one after the other."""

    seed: int
    config: Config
    timing: Timing
    workers: list[int]
    """Rollout workers of each controller."""
    calls: dict[tuple[str, int], tuple[str, str]] = field(default_factory=dict)
    ends: list[tuple[float, str]] = field(default_factory=list)
    """(virtual second, kill or stop) of each controller but the last."""
    damage: str | None = None
    timed: list[tuple[float, str]] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    hits: list[tuple[str, str]] = field(default_factory=list)
    outside: Outside | None = None
    root: Path | None = None
    """Folder of the controller that runs."""

    def fault(self, worker: str, method: str, number: int) -> str | None:
        key = f"{worker.split('-')[0]}:{method}"
        self.seen[key] += 1
        place, fault = self.calls.get((key, self.seen[key]), (None, None))
        if place is None or fault is None:
            return None
        self.hits.append((place, fault))
        if place == "controller" and self.outside is not None:
            self.outside.kill()
        return "full" if fault == "full for good" else fault

    async def disturb(self, outside: Outside, groups: Groups) -> None:
        self.outside = outside
        if self.ends:
            beside = asyncio.create_task(self.kill_workers(groups))
            when, what = self.ends.pop(0)
            await asyncio.sleep(when)
            self.hits.append(("controller", what))
            if what == "stop":
                outside.stop.ask("SIGTERM")
                await beside
            else:
                outside.kill()
        else:
            await self.kill_workers(groups)

    async def kill_workers(self, groups: Groups) -> None:
        for when, place in self.timed:
            await asyncio.sleep(when)
            for worker in groups["rollout"].workers if place == "rollout:all" else groups["rollout"].workers[:1]:
                worker.kill()
            self.hits.append((place, "kill"))

    def spoil_newest(self, root: Path) -> None:
        """Only where there is an older one to go back to."""
        checkpoints = written(root / "checkpoints")
        if self.damage is None or len(checkpoints) < 2:
            return
        file = checkpoints[0] / "weights.safetensors"
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        if self.damage == "remove":
            file.unlink()
        else:
            file.write_bytes(data if self.damage == "flip" else data[:-4])
        self.hits.append(("newest checkpoint", self.damage))


def make_schedule(seed: int) -> RecoverySchedule:
    """A random configuration with one fault of the cell that it is this seed's turn to hit, and perhaps others."""
    rng = random.Random(f"life {seed}")
    place, fault = PAIRS[seed % len(PAIRS)]
    config = toy_config(
        rng.choice([0, 1, 1, 2, 3]),
        hand_over=rng.choice(["batch", "stream"]),
        steps=STEPS,
        reward__num_workers=rng.choice([1, 2]),
        evaluate__every=rng.choice([0, 2, 3]),
        evaluate__before_training=rng.choice([False, True]),
        save__every=rng.choice([1, 2, 4]),
        save__keep=2 if place == "newest checkpoint" else rng.choice([1, 2]),
        deadlines__publish=8.0,
        resume="auto",
        console="quiet",
    )
    timing = random_timing(seed, rng)
    schedule = RecoverySchedule(seed, config, timing, [rng.choice([1, 2, 3, 4]) for _ in range(3)])
    place_fault(schedule, place, fault, rng)
    for _ in range(rng.choice([0, 1, 2])):
        place_worker_fault(schedule, rng)
    return schedule


def place_fault(schedule: RecoverySchedule, place: str, fault: str, rng: random.Random) -> None:
    saves = 2 + (STEPS - 1) // schedule.config.save.every
    update = rng.choice(UPDATE)
    if place == "trainer: update":
        schedule.calls[update, rng.randint(1, CALLS[update])] = (place, fault)
    elif place == "trainer: publish":
        method = rng.choice(PUBLISH)
        schedule.calls[method, rng.randint(1, CALLS[method])] = (place, fault)
    elif place == "trainer: snapshot":
        schedule.calls["trainer:snapshot", rng.randint(1, saves)] = (place, fault)
    elif place == "trainer: writes a checkpoint":
        first = rng.randint(1, saves)
        for call in range(first, first + {"full": rng.choice([1, 2]), "full for good": 99}.get(fault, 1)):
            schedule.calls["trainer:save", call] = (place, fault)
    elif place in ("trainer: comes back", "rollout: forgets"):
        schedule.calls[update, rng.randint(1, CALLS[update])] = ("trainer: update", "kill")
        again = {"trainer: comes back": [("trainer:load", 2), ("trainer:restore", 1)]}
        schedule.calls[rng.choice(again.get(place, [("rollout:clear", 1), ("rollout:clear", 2)]))] = (place, fault)
    elif fault == "torn":
        schedule.calls["trainer:save", rng.randint(1, saves)] = (place, fault)
    elif place == "controller":
        schedule.ends = [(rng.uniform(0.5, 12.0), fault) for _ in range(2 if fault == "kill twice" else 1)]
        if rng.random() < 0.4:
            schedule.calls[update, rng.randint(1, CALLS[update])] = ("trainer: update", "kill")
    else:
        schedule.damage = fault
        schedule.config.save.every = 1
        schedule.calls["trainer:save", rng.randint(3, STEPS + 1)] = ("controller", "kill")


def place_worker_fault(schedule: RecoverySchedule, rng: random.Random) -> None:
    place, fault = rng.choice(BESIDE)
    if place in ("rollout:idle", "rollout:all"):
        schedule.timed.append((rng.uniform(0.5, 12.0), place))
    else:
        schedule.calls.setdefault((place, rng.randint(1, CALLS[place])), (place, fault))


@contextmanager
def scratch() -> Iterator[Path]:
    """In memory where there is such a place: a disk takes milliseconds for every file that is synced."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@dataclass(frozen=True)
class Left:
    """What of a run must not depend on what happened to it."""

    digest: str
    lines: list[dict[str, Any]]
    evaluations: dict[int, float]


@functools.cache
def undisturbed(k: int, averaged: bool = False) -> Left:
    """What is left of a run with `max_staleness` k in separate pools; `averaged`: with the settings of AVERAGES."""
    more = AVERAGES if averaged else {}
    config = toy_config(k, steps=STEPS, evaluate__every=1, evaluate__before_training=True, console="quiet", **more)
    return left_by(config)


def left_by(config: Config) -> Left:
    with scratch() as folder:
        root = folder / "run"
        assert run_controller(config, root, World()) is None
        return Left(summary(root)["weights_digest"], logged(root), evaluations(root))


def run_schedule(schedule: RecoverySchedule, root: Path) -> Path:
    """Controllers one after the other until one ends by itself; returns the folder of the last."""
    for turn in range(6):
        schedule.config.rollout.num_workers, schedule.root = schedule.workers[turn % 3], root
        world = World(schedule.timing, schedule.fault)
        killed = run_controller(schedule.config, root, world, disturb=schedule.disturb, horizon=HORIZON_SECONDS)
        if killed is None and summary(root)["steps"] == STEPS:
            return root
        root = killed or Path(shutil.copytree(root, root.with_name(f"{root.name}s")))
        schedule.spoil_newest(root)
    raise AssertionError("it never ended")


@functools.cache
def outcome(seed: int) -> Ended:
    """Runs the schedule of a seed to its end."""
    schedule = make_schedule(seed)
    wrong: str | None = None
    how = "success"
    with scratch() as folder:
        try:
            root = run_schedule(schedule, folder / "run")
            check(root, schedule, undisturbed(schedule.config.max_staleness))
        except NAMED as error:
            how = type(error).__name__
            full = schedule.hits.count(("trainer: writes a checkpoint", "full for good"))
            hung = any(fatal(*hit) for hit in schedule.hits)
            if isinstance(error, SaveFailed) and full < LimitsConfig().missed_checkpoints:
                wrong = f"ended by {error!r} though the disk was full for {full} checkpoints"
            if isinstance(error, DeadlineExceeded) and not (hung and "deadline" in str(error)):
                wrong = f"ended by {error!r} though no trainer hung"
        except Exception as error:
            how, wrong = type(error).__name__, f"{type(error).__name__}: {error}"
    return Ended(seed, how, tuple(schedule.hits), 0.0, wrong)


def check(root: Path, schedule: RecoverySchedule, expected: Left) -> None:
    """What `check_left` says, and that only as many checkpoints are left as are asked for."""
    check_left(root, schedule.config, expected)
    torn = any(fault == "torn" for _, fault in schedule.hits)
    assert len(written(root / "checkpoints")) <= schedule.config.save.keep + torn


def check_left(root: Path, config: Config, expected: Left) -> None:
    """The same weights, logged rewards and tickets, each once; evaluations, as far as their weights are there."""
    assert [row for row in verify(root) if not row[1]] == []
    assert summary(root)["weights_digest"] == expected.digest
    assert logged(root) == expected.lines
    evaluated = evaluations(root)
    assert evaluated == {version: expected.evaluations[version] for version in evaluated}
    due = {version for version in range(STEPS + 1) if evaluation_due(config, version)}
    gone = {v for v in due for back in rollbacks(root) if v < back - config.max_staleness}
    assert due - gone <= set(evaluated) <= due, f"evaluated {sorted(evaluated)}, due were {sorted(due)}"
