"""Runs whose workers are late, or send wrong bytes: for `benchmarks.prove`, and for tests.

    python -m benchmarks.disturbed [disturb.STAGE=SECONDS ...] [arguments of async_flowrl.main]

A disturbed worker is a subclass of the run's own; a run takes it by its import path (`workers`).
"""

import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from async_flowrl import main as entry
from async_flowrl.seeds import derive

PREFIX = "disturb."


@dataclass(frozen=True)
class Disturbance:
    """Seeded random delays in seconds (uniform from 0 to the value) after the work of each stage; none by default."""

    generate: float = 0.0
    score: float = 0.0
    update: float = 0.0
    publish: float = 0.0
    """Before a trainer rank digests a new version."""
    constant: bool = False
    """Wait exactly the value each time."""
    freeze_publish: bool = False
    """Send the bytes of version 0 instead of those of every newer version; the run must notice it and stop."""
    seed: int = 0

    def delay(self, stage: str, *moment: int | str) -> float:
        """Returns the delay of a call of this stage in seconds; `moment` names the call and decides with the seed."""
        seconds: float = getattr(self, stage)
        return seconds * (1.0 if self.constant else random.Random(derive(self.seed, "delay", *moment)).random())

    def wait(self, stage: str, *moment: int | str) -> None:
        """Sleeps for `delay`."""
        time.sleep(self.delay(stage, *moment))


def split(words: Sequence[str]) -> tuple[Disturbance, list[str]]:
    """Returns the disturbance that `disturb.…=…` among the words describe, and the other words."""
    given: dict[str, Any] = {}
    for word in words:
        if word.startswith(PREFIX):
            name, _, value = word.removeprefix(PREFIX).partition("=")
            if name not in Disturbance.__dataclass_fields__:
                raise ValueError(f"{word} is no disturbance")
            given[name] = value == "true" if value in ("true", "false") else float(value)
    return replace(Disturbance(), **given), [word for word in words if not word.startswith(PREFIX)]


def workers(disturbance: Disturbance) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Returns what a run takes as its `workers`: none if nothing is disturbed."""
    if disturbance == Disturbance():
        return {}
    own = {
        "async_flowrl.training.trainer_worker:TrainerWorker": "LateTrainer",
        "async_flowrl.rollout.rollout_worker:RolloutWorker": "LateRollout",
        "async_flowrl.shared.shared_worker:SharedWorker": "LateShared",
        "async_flowrl.rewards.reward_worker:RewardWorker": "LateReward",
    }
    return {path: (f"benchmarks.disturbed_workers:{name}", {"disturbance": disturbance}) for path, name in own.items()}


def main() -> int:
    """Trains what sys.argv describes, disturbed; returns the exit code."""
    disturbance, sys.argv[1:] = split(sys.argv[1:])
    return entry.main(workers(disturbance))


if __name__ == "__main__":
    sys.exit(main())
