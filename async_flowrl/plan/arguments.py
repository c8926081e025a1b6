"""Command line of `python -m async_flowrl.plan`, and the kinds of numbers that tools take."""

import argparse
import math
from pathlib import Path


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
