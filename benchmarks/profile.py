"""python -m benchmarks.profile [key=value ...]: CPU seconds of both pools, by part.

One worker of each pool in this process, as in engines.py; CPU seconds, so that it can be read on a busy machine. "The
rest" is everything that is not model compute: noise, step arithmetic, log-probs, losses, statistics, conversions.
"""

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from statistics import median
from typing import Any

import torch

from async_flowrl.run.prepare import Prepared
from benchmarks.machine import machine_description
from benchmarks.page import as_sentence, markdown_table
from benchmarks.single_workers import Workers, command_line

PROBE = "probe under the sampling weights"
"""Counted with the passes it makes."""
HEAD = ("pool", "part", "CPU ms per step", "share")


@dataclass
class Parts:
    """CPU seconds of named calls, without what is counted under another name inside them."""

    seconds: dict[str, float] = field(default_factory=dict)
    _inner: list[float] = field(default_factory=list)
    _whole: bool = False
    """Inside a part that is counted with everything it calls."""

    @contextmanager
    def timed(self, owner: Any, method: str, name: str) -> Iterator[None]:
        """Inside, calls of `owner.method` are counted as `name`."""
        original: Callable[..., Any] = getattr(owner, method)

        @wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._whole:
                return original(*args, **kwargs)
            self._whole = name == PROBE
            self._inner.append(0.0)
            began = time.process_time()
            try:
                return original(*args, **kwargs)
            finally:
                taken = time.process_time() - began
                self._whole = False
                self.seconds[name] = self.seconds.get(name, 0.0) + taken - self._inner.pop()
                if self._inner:
                    self._inner[-1] += taken

        setattr(owner, method, counted)
        try:
            yield
        finally:
            setattr(owner, method, original)

    def take(self, run: Callable[[], Any]) -> dict[str, float]:
        """Seconds per part of one call; they add up to `total`."""
        self.seconds.clear()
        began = time.process_time()
        run()
        total = time.process_time() - began
        return {**self.seconds, "the rest": total - sum(self.seconds.values()), "total": total}


def profile(prepared: Prepared, rounds: int) -> dict[str, dict[str, float]]:
    """Per pool and part, median CPU seconds of a training step."""
    torch.set_num_threads(prepared.config.rollout.threads)
    workers, parts = Workers(prepared), Parts()
    rollout, trainer = workers.rollout.engine, workers.trainer
    policy: Any = getattr(rollout, "policy")  # noqa: B009
    passes = trainer.update._passes
    wrapped = (
        (policy, "velocity", "transformer"),
        (policy, "decode", "VAE decode"),
        (policy, "encode", "text encoder"),
        (trainer.policy, "velocity", "transformer"),
        (torch.Tensor, "backward", "backward"),
        (passes, "predict_frozen", PROBE),
        (passes, "batches", "micro-batches from trajectories"),
        (trainer.optimizer, "step", "optimizer"),
    )
    taken: dict[str, list[dict[str, float]]] = {"rollout": [], "trainer": []}
    with ExitStack() as stack:
        for owner, method, name in wrapped:
            stack.enter_context(parts.timed(owner, method, name))
        for _ in range(rounds + 1):
            taken["rollout"].append(parts.take(workers.generate))
            taken["trainer"].append(parts.take(workers.update))
            workers.publish()
    return {pool: _medians(rounds_taken[1:]) for pool, rounds_taken in taken.items()}


def _medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for each in rounds for name in each)
    return {name: median(each.get(name, 0.0) for each in rounds) for name in names}


def rows(pools: dict[str, dict[str, float]]) -> list[list[str]]:
    """The longest part first, the total last."""
    lines = []
    for pool, seconds in pools.items():
        order = sorted(seconds, key=lambda name: (name == "total", -seconds[name]))
        lines += [
            [pool, name, f"{1e3 * seconds[name]:.1f}", f"{seconds[name] / seconds['total']:.1%}"] for name in order
        ]
    return lines


def markdown(profiled: Mapping[str, Any]) -> str:
    """The command, the machine, and the table."""
    table = markdown_table(HEAD, rows(profiled["pools"]))
    return f"    {profiled['command']}\n\n{as_sentence(profiled['description'])}\n\n{table}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    program = "python -m benchmarks.profile"
    given = command_line(program, arguments, rounds=7)
    profiled = {
        "command": f"{program} {shlex.join(given.overrides)}".strip(),
        "description": machine_description(),
        "pools": profile(given.prepared, given.rounds),
    }
    sys.stdout.write(json.dumps(profiled, indent=2) + "\n" if given.json else markdown(profiled))
    return 0


if __name__ == "__main__":
    sys.exit(main())
