"""Rounds of measurements in pairs: how many are made, what is said meanwhile, and the medians of their ratios."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

Times = tuple[float, float]
"""Wall clock, CPU seconds."""
LEAST_ROUNDS = 3
"""Rounds that are made even if the time is over: fewer say nothing about the spread."""


class Progress:
    """Says on stderr what is measured, with the seconds since the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def say(self, sentence: str) -> None:
        sys.stderr.write(f"{time.monotonic() - self._began:6.0f} s  {sentence}\n")
        sys.stderr.flush()


def rounds_within(count: int, seconds: float, progress: Progress, what: str) -> Iterator[int]:
    """Yields 0 (the round for warming up, not to be counted) to `count`.

    It ends early when `seconds` are over and LEAST_ROUNDS rounds have been counted.
    """
    until = time.monotonic() + seconds
    for number in range(count + 1):
        if number > LEAST_ROUNDS and time.monotonic() > until:
            progress.say(f"{what}: {seconds:.0f} s are over after {number - 1} of {count} rounds")
            return
        yield number
        progress.say(f"{what}: round {number} of {count}" if number else f"{what}: warmed up")


def in_pairs(pairs: Sequence[tuple[Times, Times]]) -> tuple[str, str]:
    """Returns the first ÷ the second of each pair: by wall clock, by CPU seconds."""
    wall, cpu = ([above[place] / below[place] for above, below in pairs] for place in (0, 1))
    return spread(wall), spread(cpu)


def spread(values: Sequence[float]) -> str:
    """Median, and least and most if there is more than one value."""
    range_ = f" ({min(values):.3f}-{max(values):.3f})" if len(values) > 1 else ""
    return f"{median(values):.3f}{range_}"


def show(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a Markdown table row by row, each as soon as it is measured."""
    for cells in (head, ["---"] * len(head)):
        print_row(cells)
    for cells in rows:
        print_row(cells)
    sys.stdout.write("\n")


def print_row(cells: Sequence[str]) -> None:
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()
