"""Schedules of events that end an attempt of ranks with a share of the weights each: deaths, and damaged shares.

A rank's death takes all ranks back to the last checkpoint of which every share is sound.
`python -m tests.chaos share_recovery_schedules FIRST LAST` runs a range of seeds and prints what was hit.
"""

import functools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_flowrl.training.checkpoint import written
from tests.chaos.fault_schedules import Ended, random_timing
from tests.chaos.recovery_schedules import (
    STEPS,
    Left,
    RecoverySchedule,
    check,
    left_by,
    place_worker_fault,
    run_schedule,
    scratch,
)
from tests.support.toy import toy_config
from tests.support.toy_recovery import toy_ranks_meet
from tests.support.toy_shares import spoil_share

IN_SHARES: dict[str, Any] = {
    "tune": "full",
    "trainer__shard": "full",
    "trainer__num_workers": 2,
    "trainer__micro_batch_size": 2,
    "algorithm__kl_probe_images": 0,  # a toy in shares would measure its own rows only
}
"""Settings with which each of two trainer ranks has a share of the weights, and parts of each group to train."""
DAMAGES = ("flip", "truncate", "remove")
CELLS: dict[str, tuple[str, ...]] = {
    "rank: update": ("kill",),
    "rank: publish": ("kill",),
    "rank: gathers once more": ("kill",),
    "rank: snapshot": ("kill",),
    "rank: writes its share": ("kill", "torn", "full"),
    "first rank: ends a checkpoint": ("kill", "torn", "full"),
    "rank: comes back": ("kill",),
    "all ranks": ("kill",),
    "rollout: receives": ("kill", "hang", "corrupt", "truncate"),
    "rollout: forgets": ("kill", "hang"),
    "controller": ("kill", "kill twice"),
    "newest share": DAMAGES,
    "newest share, before a resume": DAMAGES,
}
"""Place → what can go wrong there. A share is damaged at the moment of a rank's death, or of the controller's."""
PAIRS = [(place, fault) for place, faults in CELLS.items() for fault in faults]
UPDATE = ("trainer:train", "trainer:add_up", "trainer:take_step")


@dataclass
class ShareSchedule(RecoverySchedule):
    """As RecoverySchedule, of ranks that have shares; `damage` is that of a share before a resume."""

    spoilt_rank: int = 0

    def fault(self, worker: str, method: str, number: int) -> str | None:
        fault = super().fault(worker, method, number)
        if fault not in DAMAGES or not worker.startswith("trainer"):  # a delivery to a rollout worker may be damaged
            return fault
        assert self.root is not None
        spoil_share(written(self.root / "checkpoints")[0], self.spoilt_rank, fault)
        return "kill"

    def spoil_newest(self, root: Path) -> None:
        checkpoints = written(root / "checkpoints")
        if self.damage is not None and len(checkpoints) > 1:
            spoil_share(checkpoints[0], self.spoilt_rank, self.damage)
            self.hits.append(("newest share, before a resume", self.damage))


def make_schedule(seed: int) -> ShareSchedule:
    """A random configuration with one fault of the cell that it is this seed's turn to hit, and perhaps others."""
    rng = random.Random(f"shares {seed}")
    place, fault = PAIRS[seed % len(PAIRS)]
    k = rng.choice([1, 2] if place == "rank: gathers once more" else [0, 1, 1, 2])
    config = toy_config(
        k,
        hand_over=rng.choice(["batch", "stream"]),
        steps=STEPS,
        **{**IN_SHARES, "trainer__num_workers": 3 if k == 2 else 2},
        evaluate__every=rng.choice([0, 2, 3]),
        evaluate__before_training=rng.choice([False, True]),
        save__every=1 if place.startswith("newest") else rng.choice([1, 2]),
        save__keep=rng.choice([2, 3]),
        checkpoint_engine__bucket_bytes=rng.choice([300, 1 << 20]),
        deadlines__publish=8.0,
        resume="auto",
        console="quiet",
    )
    workers = [rng.choice([1, 2, 3, 4]) for _ in range(3)]
    schedule = ShareSchedule(
        seed, config, random_timing(seed, rng), workers, spoilt_rank=rng.randrange(config.trainer.num_workers)
    )
    place_fault(schedule, place, fault, rng)
    for _ in range(rng.choice([0, 0, 1])):
        place_worker_fault(schedule, rng)
    return schedule


def place_fault(schedule: ShareSchedule, place: str, fault: str, rng: random.Random) -> None:
    config = schedule.config
    ranks, saves = config.trainer.num_workers, 2 + (STEPS - 1) // config.save.every
    once_a_step = rng.choice(UPDATE[1:]), rng.randint(3 * ranks + 1, STEPS * ranks)
    """A call that every rank gets once in a step, one of those after the third step."""
    if place == "rank: update":
        schedule.calls[rng.choice(UPDATE), rng.randint(1, STEPS * ranks)] = (place, fault)
    elif place == "rank: publish":
        schedule.calls[rng.choice(["trainer:stage", "trainer:gather"]), rng.randint(1, STEPS * ranks)] = (place, fault)
    elif place == "rank: gathers once more":
        schedule.calls["rollout:receive", 4 * schedule.workers[0] + 1] = ("rollout: receives", "kill")
        schedule.calls["trainer:recall", rng.randint(1, ranks)] = (place, fault)
    elif place == "rollout: receives":
        schedule.calls["rollout:receive", rng.randint(1, STEPS)] = (place, fault)
    elif place == "rank: snapshot":
        schedule.calls["trainer:snapshot", rng.randint(1, saves * ranks)] = (place, fault)
    elif place == "rank: writes its share":
        schedule.calls["trainer:write", rng.randint(1, saves * ranks)] = (place, fault)
    elif place == "first rank: ends a checkpoint":
        schedule.calls["trainer:end", rng.randint(1, saves)] = (place, fault)
    elif place == "all ranks":
        first, method = rng.randrange(STEPS) * ranks, rng.choice(UPDATE[1:])
        schedule.calls |= {(method, first + rank): (place, fault) for rank in range(1, ranks + 1)}
    elif place in ("rank: comes back", "rollout: forgets"):
        schedule.calls[once_a_step] = ("rank: update", "kill")
        come = [("trainer:load", 2 * ranks), ("trainer:verify", ranks), ("trainer:restore", ranks)]
        method, last = rng.choice(come) if place == "rank: comes back" else ("rollout:clear", 2)
        schedule.calls[method, rng.randint(max(1, last - ranks + 1), last)] = (place, fault)
    elif place == "newest share":
        schedule.calls[once_a_step] = (place, fault)
    elif place == "controller":
        schedule.ends = [(rng.uniform(0.5, 12.0), fault) for _ in range(2 if fault == "kill twice" else 1)]
    else:
        schedule.damage = fault
        schedule.calls["trainer:write", rng.randint(3 * ranks + 1, (STEPS + 1) * ranks)] = ("controller", "kill")


@functools.cache
def undisturbed(k: int, ranks: int = 2) -> Left:
    """What is left of a run with `max_staleness` k and so many ranks, which evaluates every version."""
    changes = {**IN_SHARES, "trainer__num_workers": ranks, "evaluate__every": 1, "evaluate__before_training": True}
    config = toy_config(k, steps=STEPS, console="quiet", **changes)
    with toy_ranks_meet():
        return left_by(config)


@functools.cache
def outcome(seed: int) -> Ended:
    """Runs the schedule of a seed to its end, which must be that of the undisturbed run."""
    schedule, wrong, how = make_schedule(seed), None, "success"
    with scratch() as folder, toy_ranks_meet():
        try:
            root = run_schedule(schedule, folder / "run")
            check(root, schedule, undisturbed(schedule.config.max_staleness, schedule.config.trainer.num_workers))
        except Exception as error:
            how, wrong = type(error).__name__, f"{type(error).__name__}: {error}"
    return Ended(seed, how, tuple(schedule.hits), 0.0, wrong)
