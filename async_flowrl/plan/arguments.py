"""Number types for the command lines of tools."""

import argparse
import math


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
