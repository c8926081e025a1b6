"""async-flowrl plan --from-run RUN: what a run measured, what bounds it, and what to change, by closed formulas.

With G and T the device-seconds of generation and of training per step, r rollout workers, t trainer ranks, R the
seconds of the slowest reward pool and S those of a delivery, a step takes G/r + T/t + S (sync), max(G/r, T/t, R)
(one_step_off and deeper), or max((G + T)/N, R) on N devices (placement=shared), if work divides evenly.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from async_flowrl.cli.options import count, pair
from async_flowrl.config.check import sharing_refusal
from async_flowrl.config.compose import read_config
from async_flowrl.config.placement import recorded_placement
from async_flowrl.config.schema import SHARED, Config
from async_flowrl.config.scoring_pools import reward_pools, workers_key
from async_flowrl.observability.events import Event, effective, read_events
from async_flowrl.observability.summary import WARM_UP_STEPS, last_attempt, steady_steps
from async_flowrl.observability.timeline import tracks, worked
from separation.text_table import format_table

HEAD = ("placement", "rollout", "trainer", "overlapped s/step", "sync s/step")
GAIN = 0.98  # A split is recommended only if its step takes less than this share of the present one's formula.
REWARDS_LIMIT = "rewards"
ROUNDING = 1e-6


@dataclass(frozen=True)
class Measured:
    generation: float  # Device-seconds of all tickets: what one rollout worker would take.
    update: float  # Device-seconds of training: what one trainer rank would take.
    rewards: Mapping[str, float]  # Reward pool → seconds that its workers take together, divided by their number.
    delivery: float  # From the staging of a version to its acknowledgement.
    step: float  # From the end of a step to the end of the next one.
    busy: Mapping[str, float]  # Pool → share of the time in which its workers were busy, from 0 to 1.

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
    """What the steady steps of the run's last attempt took, by its files. Raises ValueError if there are none."""
    config, history = load(run)
    if (steady := steady_steps(history, config.max_staleness)) is None:
        raise ValueError(f"{run} has no step between its first {WARM_UP_STEPS} and its last: it needs more steps")
    (begin, end), steps = steady
    busy = worked(tracks(history), (begin, end))
    total = {pool: sum(seconds) / steps for pool, seconds in busy.items()}
    if not total.get("rollout"):
        raise ValueError("no ticket of these steps is in events.jsonl")
    delivered = delivery_times(event for event in history if begin <= event["time"] <= end)
    return config, Measured(
        generation=total["rollout"],
        update=total.get("trainer", 0.0),
        rewards={pool.name: total.get(pool.name, 0.0) / pool.workers for pool in reward_pools(config.reward)},
        delivery=fmean(delivered or [0.0]),
        step=(end - begin) / steps,
        busy={pool: fmean(seconds) / (end - begin) for pool, seconds in busy.items()},
    )


def load(run: Path) -> tuple[Config, Sequence[Event]]:
    """Configuration and events since the run was last resumed. ValueError if a file is missing or broken."""
    # The placement is the one that the events record for these steps. They differ if the run is being resumed with
    # another placement, because the new configuration is already written.
    try:
        whole = effective(read_events(run / "events.jsonl"))
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename} is missing: {run} is not the directory of a run") from error
    config, (_, attempt) = read_config(run / "config.yaml"), last_attempt(whole)
    placements = [event["placement"] for event in whole if event["event"] == "inputs" and "placement" in event]
    return replace(config, placement=(placements or [config.placement])[-1]), attempt


def delivery_times(history: Iterable[Event]) -> list[float]:
    """Returns the seconds from the staging of a version to each worker's acknowledgement of it."""
    staged: dict[int, float] = {}
    acknowledged: list[tuple[int, float]] = []
    for event in history:
        if event["event"] == "version" and event["stream"] == "policy":
            if event["state"] == "staged":
                staged[event["version"]] = event["time"]
            elif event["state"] == "acknowledged":
                acknowledged.append((event["version"], event["time"]))
    # A version that is acknowledged after the next one was staged was delivered again, for an evaluation.
    return [
        max(0.0, time - staged[v]) for v, time in acknowledged if v in staged and time < staged.get(v + 1, time + 1)
    ]


def split_of(took: Measured, rollout: int, trainer: int, placement: str = "separate") -> Split:
    generation, update = took.generation / rollout, took.update / trainer
    overlapped = max(recorded_placement(placement).step_seconds(generation, update), took.reward)
    sync = generation + update + (took.reward if recorded_placement(placement).together else took.delivery)
    return Split(placement, rollout, trainer, overlapped, sync)


def splits(took: Measured, config: Config, devices: int, fixed: tuple[int, int] | None) -> list[Split]:
    pairs = [fixed] if fixed else [(n, devices - n) for n in range(1, devices)]
    candidates = [split_of(took, *sizes) for sizes in pairs]
    if fixed is None and not config.runtime.in_threads and sharing_refusal(config, devices) is None:
        candidates.append(split_of(took, devices, devices, SHARED))
    return candidates


def present(config: Config, took: Measured) -> Split:
    return split_of(took, config.rollout.num_workers, config.trainer.num_workers, config.placement)


def bound_of(config: Config, split: Split) -> float:
    return split.sync if config.max_staleness == 0 and config.hand_over == "batch" else split.overlapped


def limit_of(took: Measured, split: Split) -> str:
    """Returns the pool that limits an overlapped step: rollout, trainer, devices (of one shared pool) or rewards."""
    if took.reward >= split.overlapped:
        return REWARDS_LIMIT
    if recorded_placement(split.placement).together:
        return "devices"
    return "rollout" if took.generation / split.rollout >= took.update / split.trainer else "trainer"


def advice(config: Config, took: Measured, candidates: Sequence[Split]) -> list[str]:
    now = present(config, took)
    bound, limit = bound_of(config, now), limit_of(took, now)
    sentences = [f"A step took {took.step:.3g} s, {bound / took.step:.0%} of which is its formula's {bound:.3g} s."]
    if bound == now.overlapped:
        sentences.append(f"The limit is {limit}; every other pool waits for it.")
    if limit == REWARDS_LIMIT:
        slowest = max(took.rewards, key=lambda pool: took.rewards[pool])
        workers = next(pool.workers for pool in reward_pools(config.reward) if pool.name == slowest)
        computing = split_of(replace(took, rewards={}), now.rollout, now.trainer, now.placement).overlapped
        needed = math.ceil(took.rewards[slowest] * workers / computing - ROUNDING)
        return [*sentences, f"{workers_key(slowest)}={needed} in place of {workers} would be enough."]
    if bound == now.sync and now.overlapped < GAIN * now.sync:
        sentences.append(f"one_step_off would take {now.overlapped:.3g} s with the same devices.")
    best = min(candidates, key=lambda split: split.overlapped, default=now)
    if best.overlapped < GAIN * now.overlapped:
        devices = f"{best.rollout} rollout and {best.trainer} trainer devices"
        sentences.append(f"Overlapped, placement={best.placement} on {devices} would take {best.overlapped:.3g} s.")
    return sentences


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="async-flowrl plan", description="Plan a configuration, or learn from a run.")
    parser.add_argument("--from-run", type=Path, metavar="RUN_DIR", help="a run, whose measured seconds are taken")
    parser.add_argument("--devices", type=count, help="devices to split (default: the run's)")
    parser.add_argument("--split", type=pair, metavar="R:T", help="this split alone")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    for option in ("--memory", "--fit", "--rehearse"):
        parser.add_argument(option, action="store_true", help="has options of its own: add --help")
    options = parser.parse_args(arguments)
    if options.from_run is None:
        parser.error("one of --memory, --fit, --rehearse and --from-run RUN_DIR is needed")
    config, took = measured(options.from_run.expanduser())
    now = present(config, took)
    present_devices = recorded_placement(now.placement).devices(now.trainer, now.rollout)
    devices = options.devices or (sum(options.split) if options.split else present_devices)
    candidates = splits(took, config, devices, options.split)
    sentences = advice(config, took, candidates)
    if options.json:
        record: dict[str, Any] = {"measured": asdict(took), "present": asdict(now), "limit": limit_of(took, now)}
        record |= {"splits": [asdict(split) for split in candidates], "advice": sentences}
        sys.stdout.write(json.dumps(record, indent=2) + "\n")
        return
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
