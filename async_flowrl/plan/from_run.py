"""Command `python -m async_flowrl.plan --from-run RUN`: what a run measured, what bounds it, and what to change.

The seconds of other splits are closed formulas (docs/modes.md): with G and T the device-seconds of generation and of
training per step, r rollout workers, t trainer ranks and R the seconds of the slowest reward pool,

    sync                         G/r + T/t + S, with S the seconds of a delivery
    one_step_off and deeper      max(G/r, T/t, R)
    placement=shared             max((G + T)/N, R) on N devices

They assume that work divides evenly among the workers; `of bound` says how near the run itself came to its formula.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from async_flowrl.config.check import sharing_refusal
from async_flowrl.config.pools import reward_pools, workers_key
from async_flowrl.config.schema import SHARED, Config
from async_flowrl.observability.summary import WARM_UP_STEPS
from async_flowrl.plan.arguments import count, pair
from async_flowrl.plan.measured import (
    Actual,
    NothingToLearn,
    actual,
    delivery_times,
    generation_seconds,
    load,
    score_seconds,
    span_seconds,
    within,
)
from separation.table import format_table

HEAD = ("placement", "rollout", "trainer", "overlapped s/step", "sync s/step")
GAIN = 0.98
"""A split is recommended only if its step takes less than this share of the present one's formula."""
REWARDS_LIMIT = "rewards"
ROUNDING = 1e-6


@dataclass(frozen=True)
class Measured:
    """Seconds per training step of a run."""

    generation: float
    """Device-seconds of all tickets: what one rollout worker would take."""
    update: float
    """Device-seconds of training: what one trainer rank would take."""
    rewards: Mapping[str, float]
    """Reward pool → seconds that its workers take together, divided by their number."""
    delivery: float
    """From the staging of a version to its acknowledgement."""
    step: float
    """From the end of a step to the end of the next one."""
    busy: Mapping[str, float]
    """Pool → share of the time in which its workers were busy, from 0 to 1."""

    @property
    def reward(self) -> float:
        return max(self.rewards.values(), default=0.0)


@dataclass(frozen=True)
class Split:
    """Devices of generation and of training, and the seconds per step by the formulas."""

    placement: str
    rollout: int
    trainer: int
    overlapped: float
    sync: float


def measured(run: Path) -> tuple[Config, Measured]:
    """Returns the run's configuration and what the steps of its last attempt took, after the warm-up.

    Raises NothingToLearn if these steps have no timings or tickets, and ValueError if the directory is not a run's.
    """
    config, began, history, metrics = load(run)
    first = began + WARM_UP_STEPS
    lines = [line for line in metrics if line["step"] >= first and "timing/update" in line]
    steady = actual(run)
    if not lines or steady is None:
        raise NothingToLearn(f"{run} has no step from {first} on with its timing: it needs more steps")
    history = within(history, first, lines[-1]["step"] + 1)
    return config, _measured(config, history, lines, steady)


def _measured(
    config: Config, history: Sequence[Mapping[str, Any]], lines: Sequence[Mapping[str, Any]], steady: Actual
) -> Measured:
    steps, events = len(lines), [dict(event) for event in history]
    if config.placement == SHARED:
        generation, update = (span_seconds(events, pool) / steps for pool in ("rollout", "trainer"))
    else:
        generation = generation_seconds(events) / steps
        update = fmean(line["timing/update"] for line in lines) * config.trainer.num_workers
    if not generation:
        raise NothingToLearn("no ticket of these steps is in events.jsonl")
    pools = {pool.name: pool.workers for pool in reward_pools(config.reward)}
    scored = score_seconds(events, list(pools))
    return Measured(
        generation=generation,
        update=update,
        rewards={pool: scored[pool] / steps / workers for pool, workers in pools.items()},
        delivery=fmean(delivery_times(events) or [0.0]),
        step=steady.step_seconds,
        busy=steady.busy,
    )


def split_of(took: Measured, rollout: int, trainer: int) -> Split:
    """Returns two pools of these sizes with the seconds per step by the formulas."""
    generation, update = took.generation / rollout, took.update / trainer
    overlapped, sync = max(generation, update, took.reward), generation + update + took.delivery
    return Split("separate", rollout, trainer, overlapped, sync)


def shared_on(took: Measured, devices: int) -> Split:
    """Returns one pool of `devices` processes that sample and train, with the seconds per step by the formulas."""
    both = (took.generation + took.update) / devices
    return Split(SHARED, devices, devices, max(both, took.reward), both + took.reward)


def splits(took: Measured, config: Config, devices: int, fixed: tuple[int, int] | None) -> list[Split]:
    """Returns the splits of the devices, or the fixed one, and one shared pool if the configuration can have it."""
    pairs = [fixed] if fixed else [(n, devices - n) for n in range(1, devices)]
    candidates = [split_of(took, *each) for each in pairs]
    if fixed is None and config.runtime.backend != "local" and sharing_refusal(config, devices) is None:
        candidates.append(shared_on(took, devices))
    return candidates


def present(config: Config, took: Measured) -> Split:
    """Returns the run's own split."""
    if config.placement == SHARED:
        return shared_on(took, config.trainer.num_workers)
    return split_of(took, config.rollout.num_workers, config.trainer.num_workers)


def bound_of(config: Config, split: Split) -> float:
    """Returns the seconds per step of a split in the run's mode."""
    return split.sync if config.max_staleness == 0 and config.hand_over == "batch" else split.overlapped


def limit_of(took: Measured, split: Split) -> str:
    """Returns the pool that limits an overlapped step: rollout, trainer, devices (of one shared pool) or rewards."""
    if took.reward >= split.overlapped:
        return REWARDS_LIMIT
    if split.placement == SHARED:
        return "devices"
    return "rollout" if took.generation / split.rollout >= took.update / split.trainer else "trainer"


def advice(config: Config, took: Measured, candidates: Sequence[Split]) -> list[str]:
    """Returns sentences: which pool waits, and what would make a step shorter."""
    now = present(config, took)
    bound, limit = bound_of(config, now), limit_of(took, now)
    sentences = [f"A step took {took.step:.3g} s, {bound / took.step:.0%} of which is its formula's {bound:.3g} s."]
    if bound == now.overlapped:
        sentences.append(f"The limit is {limit}; every other pool waits for it.")
    if limit == REWARDS_LIMIT:
        slowest = max(took.rewards, key=lambda pool: took.rewards[pool])
        workers = next(pool.workers for pool in reward_pools(config.reward) if pool.name == slowest)
        needed = math.ceil(took.rewards[slowest] * workers / without_rewards(took, now) - ROUNDING)
        return [*sentences, f"{workers_key(slowest)}={needed} in place of {workers} would be enough."]
    if bound == now.sync and now.overlapped < GAIN * now.sync:
        sentences.append(f"one_step_off would take {now.overlapped:.3g} s with the same devices.")
    best = min(candidates, key=lambda split: split.overlapped, default=now)
    if best.overlapped < GAIN * now.overlapped:
        two = f"{best.rollout} rollout and {best.trainer} trainer devices"
        one = f"placement={SHARED} on {best.trainer} devices"
        where = one if best.placement == SHARED else two
        sentences.append(f"Overlapped, a step of {where} would take {best.overlapped:.3g} s.")
    return sentences


def without_rewards(took: Measured, split: Split) -> float:
    """Returns the seconds of generation and training of an overlapped step, without rewards."""
    if split.placement == SHARED:
        return (took.generation + took.update) / split.trainer
    return max(took.generation / split.rollout, took.update / split.trainer)


def main(given: argparse.Namespace) -> int:
    """Prints what the run measured and the splits; returns the exit code, 2 if the run says too little."""
    try:
        config, took = measured(given.from_run.expanduser())
    except ValueError as error:
        sys.stderr.write(f"plan: {error}\n")
        return 2
    now = present(config, took)
    own = now.trainer if now.placement == SHARED else now.rollout + now.trainer
    devices = given.devices or (sum(given.split) if given.split else own)
    candidates = splits(took, config, devices, given.split)
    sentences = advice(config, took, candidates)
    if given.json:
        record = {
            "measured": asdict(took),
            "present": asdict(now),
            "limit": limit_of(took, now),
            "splits": [asdict(split) for split in candidates],
            "advice": sentences,
        }
        sys.stdout.write(json.dumps(record, indent=2) + "\n")
        return 0
    rows = [
        (split.placement, str(split.rollout), str(split.trainer), f"{split.overlapped:.3g}", f"{split.sync:.3g}")
        for split in candidates
    ]
    busy = ", ".join(f"{pool} {share:.0%}" for pool, share in sorted(took.busy.items()))
    rewards = ", ".join(f"{pool} {seconds:.3g}" for pool, seconds in took.rewards.items())
    sys.stdout.write(
        f"measured per step: generation {took.generation:.3g} and training {took.update:.3g} device-seconds, "
        f"rewards {rewards or 0} s, delivery {took.delivery:.3g} s; busy: {busy}\n\n"
        f"{format_table(HEAD, rows, align=str.rjust)}\n\n" + "\n".join(sentences) + "\n"
    )
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--from-run", type=Path, metavar="RUN_DIR", help="a run, whose measured seconds are taken")
    parser.add_argument("--devices", type=count, help="devices to split (default: the run's)")
    parser.add_argument("--split", type=pair, metavar="R:T", help="this split alone")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
