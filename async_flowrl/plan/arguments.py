"""Command line of `python -m async_flowrl.plan`, and number types for the command lines of other tools."""

import argparse
import math
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the prediction command, which `plan/__main__.py` calls."""
    command_line = argparse.ArgumentParser(
        prog="python -m async_flowrl.plan", description="Predict a run, and choose its shape."
    )
    option = command_line.add_argument
    option("--from-run", type=Path, metavar="RUN_DIR", help="take all laws from this run's events")
    option("--generate", type=seconds, metavar="S", help="device-seconds to generate one step's images")
    option("--update", type=seconds, metavar="S", help="device-seconds to train one step")
    option("--sync", type=seconds, default=0.0, metavar="S", help="seconds from staging until workers hold a version")
    option("--stage", type=seconds, default=0.0, metavar="S", help="seconds the trainer waits for a publish")
    option("--reward", type=seconds, default=0.0, metavar="S", help="seconds to score one group")
    option("--cv", type=seconds, default=0.05, help="standard deviation ÷ mean of a ticket's generation (default 0.05)")
    option("--reward-cv", type=seconds, default=0.0)
    option("--update-cv", type=seconds, default=0.05)
    option("--serial", type=share, default=0.0, help="share of an update that more ranks do not shorten (default 0)")
    option(
        "--slow-worker", type=factor, default=1.0, metavar="X", help="the first rollout worker takes X times as long"
    )
    option("--prompts", type=count, default=16, help="prompts per step (default 16)")
    option("--group-size", type=count, default=16, help="images per prompt (default 16)")
    option("--ticket-size", type=count, help="images per ticket (default: a whole group)")
    option("--tickets-per-batch", type=count, default=1, help="tickets that a worker makes at once (default 1)")
    option(
        "--costs",
        type=costs,
        default=((), ()),
        metavar="X:SHARE,Y:SHARE",
        help="relative durations of groups, one for each image size, and the share of the groups that has it",
    )
    option(
        "--evaluation", type=seconds, default=0.0, metavar="S", help="device-seconds of one evaluation (default: none)"
    )
    option("--evaluate-every", type=count, help="training steps between two evaluations (default 50)")
    option("--evaluation-prompts", type=count, help="prompts of an evaluation, one ticket each (default 16)")
    option("--devices", type=count, help="devices to split (default 2, or the run's)")
    option("--cores", type=count, help="cores of the one machine on which workers compute (default: they have GPUs)")
    option("--backend", choices=("ray", "local"), help="runtime.backend (default ray, or the run's)")
    option("--split", type=pair, metavar="R:T", help="fix the split instead of searching it")
    option("--reward-workers", type=count, help="not counted among the devices (default 1, or the run's)")
    option("--store", type=factor, default=math.inf, metavar="GIB", help="object store for images and trajectories")
    option("--image-megabytes", type=seconds, default=0.0, help="one image with its trajectory in the object store")
    option("--adapter-megabytes", type=seconds, default=0.0, help="one version of the weights")
    option("--no-shared", action="store_true", help="what samples and trains on one base does not fit one device")
    option("--steps", type=count, help="steps to simulate (default: enough for some 1,000 tickets)")
    option("--memory", action="store_true", help="device memory of a configuration instead; has options of its own")
    option("--fit", action="store_true", help="which recipes fit which hardware instead; has options of its own")
    option("--rehearse", action="store_true", help="run a configuration on shapes alone; has options of its own")
    option("--json", action="store_true", help="print the plan as JSON")
    return command_line


def seconds(value: str) -> float:
    """Parses a finite number of at least 0. Raises argparse.ArgumentTypeError if it is negative, infinite or NaN."""
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {value}")
    return number


def factor(value: str) -> float:
    """Parses a finite number above 0."""
    if (number := seconds(value)) == 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {value}")
    return number


def costs(value: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Parses `X,Y` or `X:SHARE,Y:SHARE`, numbers above 0; shares are in relation to each other.

    Returns the numbers X, Y divided by their mean, and the shares divided by their sum, empty if none is given. Raises
    argparse.ArgumentTypeError if some have a share and others not.
    """
    given = [each.partition(":") for each in value.split(",")]
    if len({separator for _, separator, _ in given}) > 1:
        raise argparse.ArgumentTypeError(f"all must have a share or none, for example 1:0.7,2.4:0.3, got {value}")
    numbers = [factor(number) for number, _, _ in given]
    weights = [factor(weight) if separator else 1.0 for _, separator, weight in given]
    shares = tuple(weight / sum(weights) for weight in weights)
    mean = sum(number * share for number, share in zip(numbers, shares, strict=True))
    return tuple(number / mean for number in numbers), shares if given[0][1] else ()


def share(value: str) -> float:
    """Parses a number between 0 and 1, both included."""
    if (number := seconds(value)) > 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, got {value}")
    return number


def count(value: str) -> int:
    """Parses a whole number of at least 1."""
    if (number := int(value)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return number


def pair(value: str) -> tuple[int, int]:
    """Parses `ROLLOUT:TRAINER`, two whole numbers of at least 1."""
    left, separator, right = value.partition(":")
    if not separator:
        raise argparse.ArgumentTypeError(f"must be ROLLOUT:TRAINER, for example 5:3, got {value}")
    return count(left), count(right)
