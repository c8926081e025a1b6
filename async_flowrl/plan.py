"""python -m async_flowrl.plan: step time, busy shares, ages and bytes before a run, and what to do about them.

    python -m async_flowrl.plan --generate 40 --update 40 --sync 1 --devices 8
    python -m async_flowrl.plan --from-run outputs/one_step_off --devices 8
    python -m async_flowrl.plan --memory --config-name one_step_off experiment=qwen_image_ocr

`--generate` and `--update` are device-seconds per training step: what one rollout worker, or one trainer rank, would
take alone. Every prediction runs the real loop, tickets and gate in virtual time, on workers that only wait.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from async_flowrl.observability.summary import WARM_UP_STEPS
from async_flowrl.planning.advise import Limits, advise
from async_flowrl.planning.calibrate import NothingToLearn, actual, calibrate
from async_flowrl.planning.laws import Law
from async_flowrl.planning.show import as_json, comparison, text
from async_flowrl.planning.simulate import simulate
from async_flowrl.planning.work import Work

GIB = 2**30
LEAST_STEPS = 8
"""Steps after the warm-up from which a run is compared with its plan: half of them to learn from, half to predict."""


def predicted_against_actual(run: Path) -> dict[str, Any] | None:
    """Learns the laws from the first half of a run's steps and predicts the second half; what that half really took.

    `sentence` says it in words. None for runs too short to tell. A gap is time the schedule does not explain:
    evaluations and checkpoints, pools that slow each other down, or work that changed over the run.
    """
    try:
        whole = calibrate(run)
        count = whole.steps - WARM_UP_STEPS - whole.config.max_staleness
        if count < LEAST_STEPS:
            return None
        half = WARM_UP_STEPS + count // 2
        learnt = calibrate(run, last=half)
    except NothingToLearn:
        return None
    measured = actual(run, first=half)
    if measured is None:
        return None
    steps = min(whole.config.total_steps, 60) + learnt.layout.max_staleness + WARM_UP_STEPS
    plan = simulate(learnt.work, learnt.layout, steps=steps)
    found: dict[str, Any] = {
        "predicted": {
            "step_seconds": plan.step_seconds,
            "rollout": plan.busy("rollout"),
            "trainer": plan.busy("trainer"),
        },
        "actual": {
            "step_seconds": measured.step_seconds,
            "rollout": measured.busy.get("rollout", 0.0),
            "trainer": measured.busy.get("trainer", 0.0),
        },
        "deviation": measured.step_seconds / plan.step_seconds - 1.0,
        "learnt_from_steps": [WARM_UP_STEPS, half],
    }
    return {**found, "sentence": comparison(found)}


def work_of(given: argparse.Namespace) -> tuple[Work, Limits]:
    """From the command line; a run's laws first, then what was given beside it."""
    devices, split = given.devices, given.split
    limits = Limits(
        devices=devices or (sum(split) if split else 2),
        memory=given.store * GIB,
        reward=given.reward_workers or 1,
        split=split,
        steps=given.steps,
        slow=(given.slow_worker,) if given.slow_worker != 1 else (),
        colocate=not given.no_colocate,
    )
    if given.from_run is not None:
        return from_run(given, limits)
    if given.generate is None or given.update is None:
        raise ValueError("either --from-run RUN_DIR, or both --generate and --update, are needed")
    return from_numbers(given), limits


def from_run(given: argparse.Namespace, limits: Limits) -> tuple[Work, Limits]:
    run = calibrate(given.from_run.expanduser())
    devices = given.devices or (sum(given.split) if given.split else run.layout.rollout + run.layout.trainer)
    limits = replace(limits, devices=devices, reward=given.reward_workers or run.layout.reward)
    return replace(run.work, serial=given.serial, switch=given.switch), limits


def from_numbers(given: argparse.Namespace) -> Work:
    size = given.group_size
    ticket = given.ticket_size or size
    if size % ticket:
        raise ValueError(f"--ticket-size {ticket} must divide --group-size {size}")
    per_group, groups = size // ticket, given.prompts
    return Work(
        prompts_per_step=groups,
        tickets_per_group=per_group,
        group_size=size,
        generate=Law(given.generate / (groups * per_group), given.cv),
        update=Law(given.update / groups, given.update_cv),
        score=Law(given.reward, given.reward_cv),
        stage=Law(given.stage),
        deliver=Law(given.sync),
        serial=given.serial,
        switch=given.switch,
        ticket_bytes=int(given.image_megabytes * 1e6) * ticket,
        adapter_bytes=int(given.adapter_megabytes * 1e6),
    )


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m async_flowrl.plan", description="Predict a run, and choose its shape."
    )
    number = found.add_argument
    number("--from-run", type=Path, metavar="RUN_DIR", help="take all laws from this run's events")
    number("--generate", type=seconds, metavar="S", help="device-seconds to generate one step's images")
    number("--update", type=seconds, metavar="S", help="device-seconds to train one step")
    number("--sync", type=seconds, default=0.0, metavar="S", help="seconds from staging until workers hold a version")
    number("--stage", type=seconds, default=0.0, metavar="S", help="seconds the trainer waits for a publish")
    number("--reward", type=seconds, default=0.0, metavar="S", help="seconds to score one group")
    number("--switch", type=seconds, default=0.0, metavar="S", help="seconds per step that colocated pools lose")
    number("--cv", type=seconds, default=0.05, help="standard deviation ÷ mean of a ticket's generation (default 0.05)")
    number("--reward-cv", type=seconds, default=0.0)
    number("--update-cv", type=seconds, default=0.05)
    number("--serial", type=share, default=0.0, help="share of an update that more ranks do not shorten (default 0)")
    number(
        "--slow-worker", type=factor, default=1.0, metavar="X", help="the first rollout worker takes X times as long"
    )
    number("--prompts", type=count, default=16, help="prompts per step (default 16)")
    number("--group-size", type=count, default=16, help="images per prompt; trainer ranks must divide it (default 16)")
    number("--ticket-size", type=count, help="images per ticket (default: a whole group)")
    number("--devices", type=count, help="devices to split (default 2, or the run's)")
    number("--split", type=pair, metavar="R:T", help="fix the split instead of searching it")
    number("--reward-workers", type=count, help="not counted among the devices (default 1, or the run's)")
    number("--store", type=factor, default=math.inf, metavar="GIB", help="object store for images and trajectories")
    number("--image-megabytes", type=seconds, default=0.0, help="one image with its trajectory in the object store")
    number("--adapter-megabytes", type=seconds, default=0.0, help="one version of the weights")
    number("--no-colocate", action="store_true", help="both models do not fit one device")
    number("--steps", type=count, help="steps to simulate (default: enough for some 1,000 tickets)")
    number("--memory", action="store_true", help="device memory of a configuration instead; has options of its own")
    number("--json", action="store_true", help="print the plan as JSON")
    return found


def seconds(value: str) -> float:
    return _at_least(value, 0.0)


def factor(value: str) -> float:
    found = _at_least(value, 0.0)
    if found == 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {value}")
    return found


def share(value: str) -> float:
    found = _at_least(value, 0.0)
    if found > 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, got {value}")
    return found


def count(value: str) -> int:
    found = int(value)
    if found < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return found


def pair(value: str) -> tuple[int, int]:
    left, separator, right = value.partition(":")
    if not separator:
        raise argparse.ArgumentTypeError(f"must be ROLLOUT:TRAINER, for example 5:3, got {value}")
    return count(left), count(right)


def _at_least(value: str, least: float) -> float:
    found = float(value)
    if not math.isfinite(found) or found < least:
        raise argparse.ArgumentTypeError(f"must be a number of at least {least:g}, got {value}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--memory" in words:
        from async_flowrl.planning.memory_report import main as report_memory

        words.remove("--memory")
        return report_memory(words)
    given = parser().parse_args(words)
    try:
        advice = advise(*work_of(given))
    except ValueError as error:
        sys.stderr.write(f"plan: {error}\n")
        return 2
    compared = predicted_against_actual(given.from_run.expanduser()) if given.from_run is not None else None
    if given.json:
        sys.stdout.write(json.dumps({**as_json(advice), "run": compared}, indent=2) + "\n")
        return 0
    sys.stdout.write(text(advice))
    if compared:
        sys.stdout.write(f"The run itself: {compared['sentence']}.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
