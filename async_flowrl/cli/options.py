"""Types of command line options, for argparse."""

import argparse
import re
from pathlib import Path

from async_flowrl.config.settings import MAX_SEED


def count(value: str) -> int:
    if (number := int(value)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return number


def gigabytes(value: str) -> float:
    if not value.replace(".", "", 1).isdecimal() or not float(value):
        raise argparse.ArgumentTypeError(f"must be a card's memory in GB, as it is sold, for example 80, got {value}")
    return float(value)


def seed(value: str) -> int:
    if not 0 <= (number := int(value)) <= MAX_SEED:
        raise argparse.ArgumentTypeError(f"must be from 0 to {MAX_SEED}, got {value}")
    return number


def folder(value: str) -> Path:
    if (path := Path(value).expanduser()).is_file():
        raise argparse.ArgumentTypeError(f"must be a folder, and {value} is a file")
    return path


def pair(value: str) -> tuple[int, int]:
    left, separator, right = value.partition(":")
    if not separator:
        raise argparse.ArgumentTypeError(f"must be ROLLOUT:TRAINER, for example 5:3, got {value}")
    return count(left), count(right)


def of_option(reason: object, option: str, value: str | None) -> str:
    """Returns a refusal in which the option stands for the setting `model.path`, if the model is its value."""
    return str(reason) if value is None else re.sub(rf"\bmodel\.path(?= '?{re.escape(value)})", option, str(reason))
