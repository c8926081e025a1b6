"""The bare loops in a process of their own, for `frame.py`: malloc as it is or as workers set it, 1 thread or more.

`BareProcess` starts and asks it. Its command, `python -m tests.performance.bare_process MALLOC key=value ...`, loads
the model, makes a step, and then answers each line on its stdin: the numbers of threads and of steps to make.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from async_flowrl.benchmark.bare import Bare
from async_flowrl.config.compose import compose_config
from async_flowrl.policies.loading import quiet
from async_flowrl.policies.lora import targeted_modules
from async_flowrl.policies.registry import DTYPES, load_policy
from async_flowrl.run.prepare import Prepared, prepare
from async_flowrl.tickets.arithmetic import trained_steps
from separation.malloc import keep_freed_memory, set_by_environment

AS_IT_IS, AS_WORKERS = "as it is", "as in workers"


@dataclass(frozen=True)
class Steps:
    """What some steps of the loops took, per step."""

    cpu: float
    clock: float


class BareProcess:
    """The loops in one process; `malloc` is AS_IT_IS, as people write a loop, or AS_WORKERS."""

    def __init__(self, malloc: str, overrides: Sequence[str]) -> None:
        command = [sys.executable, "-m", "tests.performance.bare_process", malloc, *overrides]
        plain = {name: value for name, value in os.environ.items() if not set_by_environment({name: value})}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=plain)
        self._answer()

    def measure(self, threads: int, steps: int) -> Steps:
        """Makes `steps` steps with `threads` threads. Raises RuntimeError if the process died."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{threads} {steps}\n")
            self._process.stdin.flush()
        return Steps(**self._answer())

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError("the bare loops died; their message is above")
        return dict(json.loads(line))


class Loops:
    """Sampling and training of whole steps in turns, with the tickets and micro-batches of a run."""

    def __init__(self, overrides: Sequence[str]) -> None:
        with tempfile.TemporaryDirectory() as directory:
            prepared = prepare(compose_config(overrides=[*overrides, f"output_dir={directory}/bare"]))
        self.config = prepared.config
        self.texts = [prepared.requests.train[index].text for index in range(self.config.prompts_per_step)]
        self.bare = bare_of(prepared)

    def step(self) -> None:
        config, count = self.config, trained_steps(self.config)
        groups = [self.bare.generate(text, config.group_size)[1] for text in self.texts]
        self.bare.update(groups, trained=count, at_once=config.trainer.timesteps_per_forward or count)


def bare_of(prepared: Prepared) -> Bare:
    config, model = prepared.config, prepared.model
    policy = load_policy(model, dtype=model.dtype, device="cpu", parts="structure")
    with quiet():
        bare = Bare(
            model.path,
            side=config.rollout.resolution,
            steps=config.rollout.num_inference_steps,
            targets=targeted_modules(policy.transformer, config.lora, policy),
            rank=config.lora.rank,
            dtype=DTYPES[model.dtype],
        )
    bare.pipe.set_progress_bar_config(disable=True)
    return bare


def main(malloc: str, *overrides: str) -> None:
    if malloc == AS_WORKERS:
        keep_freed_memory()
    torch.set_num_threads(1)
    loops = Loops(overrides)
    loops.step()
    say({})
    for line in sys.stdin:
        threads, steps = map(int, line.split())
        torch.set_num_threads(threads)
        cpu, clock = time.process_time(), time.perf_counter()
        for _ in range(steps):
            loops.step()
        say({"cpu": (time.process_time() - cpu) / steps, "clock": (time.perf_counter() - clock) / steps})


def say(answer: dict[str, float]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
