"""Whole runs and lone workers for `placements.py`: seconds per step, and CPU seconds of every process of a run."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from async_flowrl.benchmark.variants import NOTHING_BUT_TRAINING
from async_flowrl.config.compose import compose_config
from async_flowrl.observability.summary import WARM_UP_STEPS
from async_flowrl.run.prepare import prepare
from tests.performance.engines import Workers, timed
from tests.performance.processes import DAEMONS, DRIVER, UNUSED, Tree
from tests.performance.start import whole_lines

POLL_SECONDS = 0.2
"""Only the size of a file is looked at: who measures takes no core from what is measured."""
RAY = frozenset(DAEMONS.values())


@dataclass(frozen=True)
class Alone:
    """Seconds of one step by one process of one thread that has the machine for itself."""

    generation: float
    update: float

    @property
    def half(self) -> float:
        """(G + T) / 2: a step on two cores that never wait."""
        return (self.generation + self.update) / 2


@dataclass(frozen=True)
class Run:
    """A whole run after its warm-up, by the clock, and its CPU seconds per step."""

    step_seconds: float
    workers_cpu: float
    """Of all processes that sample, train or score."""
    driver_cpu: float
    ray_cpu: float
    """Of Ray's daemons and of processes that Ray keeps without work."""
    took: float
    """Seconds from the command to its end."""


@dataclass(frozen=True)
class Command:
    """A run to be made: from which tree, in which mode, with which overrides."""

    tree: Path
    mode: str
    overrides: Sequence[str]
    steps: int
    """Measured ones, between the warm-up and a last one, which has nothing left to sample."""


def run(command: Command, directory: Path) -> Run:
    """Raises RuntimeError with its output for a run that fails."""
    out, log, first = directory / "run", directory / "output.txt", WARM_UP_STEPS
    total = first + command.steps + 1
    arguments = [*NOTHING_BUT_TRAINING, *command.overrides, f"total_steps={total}", f"output_dir={out}"]
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "async_flowrl.main", "--config-name", command.mode, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=command.tree,
            env={**os.environ, "PYTHONPATH": str(command.tree)},
        )
        tree, metrics = Tree(process.pid, out), out / "metrics.jsonl"
        looks = []
        for done in (first, first + command.steps):
            while process.poll() is None and (not metrics.exists() or len(whole_lines(metrics)) < done):
                time.sleep(POLL_SECONDS)
            tree.look()
            looks.append(tree.by_part())
        if process.wait():
            raise RuntimeError(f"{command.mode} {' '.join(arguments)}:\n{log.read_text()[-4000:]}")
    before, after = looks
    per_step = {part: (after[part] - before.get(part, 0.0)) / command.steps for part in after}
    ray = sum(seconds for part, seconds in per_step.items() if part in RAY or part == UNUSED)
    driver = per_step.get(DRIVER, 0.0)
    return Run(
        step_seconds=step_seconds(out / "events.jsonl", first, command.steps),
        workers_cpu=sum(per_step.values()) - ray - driver,
        driver_cpu=driver,
        ray_cpu=ray,
        took=time.monotonic() - began,
    )


def step_seconds(events: Path, first: int, count: int) -> float:
    """From the end of step `first` - 1 to that of the last one that is measured, divided by their number."""
    lines = [json.loads(line) for line in whole_lines(events)]
    ended = {line["step"]: line["ended"] for line in lines if line["event"] == "step"}
    return float(ended[first + count - 1] - ended[first - 1]) / count


class Lone:
    """A process of one thread that samples and trains steps when it is asked to."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def ask(self, load: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{load}\n")
        self._process.stdin.flush()

    def answer(self) -> Alone:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                return Alone(**json.loads(line))
        raise RuntimeError(f"the process that samples and trains alone ended with {self._process.wait()}")


@contextmanager
def lone(count: int, loads: Mapping[str, Sequence[str]]) -> Iterator[list[Lone]]:
    """So many of them, which have built what they need for every load."""
    command = [sys.executable, "-m", "tests.performance.placement_runs", json.dumps(dict(loads))]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    try:
        yield [Lone(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def serve(loads: Mapping[str, Sequence[str]]) -> None:
    """Samples and trains a step of each load that is named on standard input; prints its seconds."""
    torch.set_num_threads(1)
    built = {}
    for name, overrides in loads.items():
        workers = Workers(prepare(compose_config("one_step_off", [*overrides, "output_dir=outputs/none"])))
        one_step(workers)
        built[name] = workers
    for line in sys.stdin:
        generation, update = one_step(built[line.strip()])
        sys.stdout.write(json.dumps({"generation": generation, "update": update}) + "\n")
        sys.stdout.flush()


def one_step(workers: Workers) -> tuple[float, float]:
    taken = timed(workers.generate)[0], timed(workers.update)[0]
    workers.publish()
    return taken


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
