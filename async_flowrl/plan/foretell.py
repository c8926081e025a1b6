"""Predictions that a run prints before its first step: seconds per step (`step_time`) and memory (`device_memory`).

A failure of the planner is named in the returned sentence and never ends the run.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from async_flowrl.config.reward_pools import is_scoring_pool
from async_flowrl.config.schema import Config
from async_flowrl.observability.events import read_events
from async_flowrl.observability.ledger import pool_of
from async_flowrl.observability.progress import duration
from async_flowrl.observability.summary import WARM_UP_STEPS
from async_flowrl.plan.calibrate import NothingToLearn, calibrate
from async_flowrl.plan.memory import plan_memory
from async_flowrl.plan.memory_report import GIB, processes
from async_flowrl.plan.simulate import simulate

logger = logging.getLogger(__name__)

MAX_SIMULATED_STEPS = 40
"""Upper limit of the run's steps that are simulated, besides those of the warm-up."""


def step_time(config: Config, run_directory: Path) -> str:
    """Returns a sentence with the seconds per step, or with the reason why they cannot be predicted.

    The run is simulated with the durations of its earlier steps, which the same numbers of workers must have made.
    """
    try:
        if workers_before(run_directory) != workers_of(config):
            return "no step time: other workers made earlier steps"
        learnt = calibrate(run_directory)
        if learnt.resized:
            return "no step time: the rollout pool changed its size"
        count = min(config.total_steps, MAX_SIMULATED_STEPS) + config.max_staleness + 2 * WARM_UP_STEPS
        layout = replace(learnt.layout, placement=config.placement)
        seconds = simulate(learnt.work, layout, steps=count).step_seconds
    except NothingToLearn:
        return "no step time: too few earlier steps"
    except Exception:  # any error: a run must start without a prediction too
        logger.info("no plan of the step time", exc_info=True)
        return "no step time: the planner failed"
    done = sum(1 for _ in read_events(run_directory / "metrics.jsonl"))
    left = max(0, config.total_steps - done)
    before = learnt.layout.placement
    how = "as earlier steps took" if before == config.placement else f"from what earlier steps did with {before} pools"
    return f"{seconds:.3g} s per step, {how}, {duration(seconds * left)} for the {left} that are left"


def workers_of(config: Config) -> dict[str, int]:
    """Returns pool → number of its workers by the configuration, for rollout and trainer."""
    return {"rollout": config.rollout.num_workers, "trainer": config.trainer.num_workers}


def workers_before(run_directory: Path) -> dict[str, int]:
    """Returns the rollout and trainer workers that were recorded last, after a rollback or at the start, by pool."""
    newest: Counter[str] = Counter()
    fresh = True
    for event in read_events(run_directory / "events.jsonl"):
        if event["event"] == "rollback":
            fresh = True
        elif event["event"] == "worker" and "pid" in event:
            if fresh:
                newest, fresh = Counter(), False
            newest[pool_of(event["worker"])] += 1
    return {pool: newest[pool] for pool in ("rollout", "trainer")}


def device_memory(config: Config, memory: Mapping[str, int]) -> str:
    """Returns a sentence with the planned memory of each kind of process, or the reason why there is no plan.

    `memory` is bytes of device memory by pool. The smallest device of the trainer and rollout pools is planned for.
    """
    sizes = [size for pool, size in memory.items() if not is_scoring_pool(pool)]
    if not sizes:
        return "no memory: only rewards have GPUs"
    try:
        device = min(sizes)
        needs = [
            f"{one.title} {one.footprint.total / GIB:.3g} of {one.available(device / GIB) / GIB:.3g} GiB"
            for one in processes(plan_memory(config), config)
            if one.footprint.parts
        ]
    except ValueError as error:
        logger.info("no plan of the memory: %s", error)
        return "no memory: model cannot be planned"
    except Exception:  # any error: a run must start without a prediction too
        logger.info("no plan of the memory", exc_info=True)
        return "no memory: the planner failed"
    return "memory: " + ", ".join(needs)
