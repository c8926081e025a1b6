"""python -m tests.performance.accumulation: CPU milliseconds of adding gradients exactly, beside plain float addition.

Per part: floats add and clear, the exact sum finds the largest magnitude, too. Per step: one division. Rounds are
interleaved on one thread; medians are reported, of the differences within a round.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from async_flowrl.training.exact import ExactSum

SIZES = (40_000, 5_000_000, 50_000_000)
"""Trained numbers: the tiny model's, those of a small LoRA, and of a rank-32 LoRA of a model of billions."""


def milliseconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return 1e3 * (time.process_time() - began)


def compare(numel: int, rounds: int) -> list[float]:
    """Medians: floats and what exact costs more, per part and per step."""
    gradient = 1e-3 * torch.randn(numel, generator=torch.Generator().manual_seed(0))
    given, floats, out = gradient.clone(), torch.zeros(numel), torch.empty(numel)
    exact = ExactSum(numel, gradient.device)

    def add_floats() -> Tensor:
        floats.add_(given)
        return given.zero_()

    ways = (add_floats, lambda: exact.add(given), lambda: torch.div(floats, 96, out=out), lambda: exact.mean(out, 96))
    found = []
    for _ in range(rounds + 1):
        times = []
        for work in ways:
            given.copy_(gradient)
            times.append(milliseconds(work))
        part, exact_part, step, exact_step = times
        found.append((part, exact_part - part, step, exact_step - step))
    return [statistics.median(column) for column in zip(*found[1:], strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print("trained numbers | a part, floats | exact costs more | a step, floats | exact costs more   (ms)", flush=True)
    for numel in SIZES:
        part, more, step, more_step = compare(numel, options.rounds)
        print(f"{numel:>15,} | {part:14.3f} | {more:16.3f} | {step:14.3f} | {more_step:16.3f}", flush=True)


if __name__ == "__main__":
    main()
