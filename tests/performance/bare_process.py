"""The bare loops in a process of their own, for `frame.py`: malloc as it is or as workers set it, 1 thread or more.

`BareProcess` starts and asks it. Its command, `python -m tests.performance.bare_process MALLOC BACKWARD key=value ...`,
loads the model, makes a step, and then answers each line on its stdin: the numbers of threads and of steps to make.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from separation.malloc import keep_freed_memory, set_by_environment

from async_flowrl.benchmark.bare import Bare, Group
from async_flowrl.config.compose import compose_config
from async_flowrl.policies.loading import quiet
from async_flowrl.policies.lora import targeted_modules
from async_flowrl.policies.registry import DTYPES, load_policy
from async_flowrl.run.prepare import Prepared, prepare
from async_flowrl.tickets.arithmetic import trained_steps

AS_IT_IS, AS_WORKERS = "as it is", "as in workers"
BY_GROUP, WHOLE = "by group", "whole"
"""Backward passes of a step: one for each group, or one for the rows of all groups."""


@dataclass(frozen=True)
class Steps:
    """What some steps of the loops took, per step."""

    cpu: float
    clock: float
    peak_bytes: int = 0
    """Largest resident set that the process has had."""


class BareProcess:
    """The loops in one process; `malloc` is AS_IT_IS, as people write a loop, or AS_WORKERS.

    With `whole` the rows of all groups go through one backward pass.
    """

    def __init__(self, malloc: str, overrides: Sequence[str], *, whole: bool = False) -> None:
        backward = WHOLE if whole else BY_GROUP
        command = [sys.executable, "-m", "tests.performance.bare_process", malloc, backward, *overrides]
        plain = {name: value for name, value in os.environ.items() if not set_by_environment({name: value})}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=plain)
        self._answer()

    def measure(self, threads: int, steps: int) -> Steps:
        """Makes `steps` steps with `threads` threads. Raises RuntimeError if the process died."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{threads} {steps}\n")
            self._process.stdin.flush()
        answer = self._answer()
        return Steps(answer["cpu"], answer["clock"], int(answer["peak_bytes"]))

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError("the bare loops died; their message is above")
        return dict(json.loads(line))


class Loops:
    """Sampling and training of whole steps in turns, with the tickets and micro-batches of a run."""

    def __init__(self, overrides: Sequence[str], *, whole: bool) -> None:
        self._whole = whole
        with tempfile.TemporaryDirectory() as directory:
            prepared = prepare(compose_config(overrides=[*overrides, f"output_dir={directory}/bare"]))
        self.config = prepared.config
        self.texts = [prepared.requests.train[index].text for index in range(self.config.prompts_per_step)]
        self.bare = bare_of(prepared)

    def step(self) -> None:
        config, count = self.config, trained_steps(self.config)
        at_once = config.trainer.timesteps_per_forward or count
        groups = [self.bare.generate(text, config.group_size)[1] for text in self.texts]
        if self._whole:
            groups = [self.in_one(groups, at_once)]
        self.bare.update(groups, trained=count, at_once=at_once)

    def in_one(self, groups: Sequence[Group], at_once: int) -> Group:
        """One group with the images of all; its text's embeddings have a row for each image, `at_once` times over.

        Shorter texts are padded with zeros, without a mask: what is computed costs as much, and is not the same.
        """
        texts, xs, log_probs = zip(*groups, strict=True)
        known, name = self.bare.texts, " | ".join(texts)
        if name not in known:
            longest = max(known[text].shape[1] for text in texts)
            rows = [
                torch.nn.functional.pad(known[text], (0, 0, 0, longest - known[text].shape[1])).expand(
                    len(each[0]), -1, -1
                )
                for text, each in zip(texts, xs, strict=True)
            ]
            known[name] = torch.cat(rows).repeat(at_once, 1, 1)
        latents, means = ([torch.cat(row) for row in zip(*each, strict=True)] for each in (xs, log_probs))
        return name, latents, means


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


def main(malloc: str, backward: str, *overrides: str) -> None:
    if malloc == AS_WORKERS:
        keep_freed_memory()
    torch.set_num_threads(1)
    loops = Loops(overrides, whole=backward == WHOLE)
    loops.step()
    say({})
    for line in sys.stdin:
        threads, steps = map(int, line.split())
        torch.set_num_threads(threads)
        cpu, clock = time.process_time(), time.perf_counter()
        for _ in range(steps):
            loops.step()
        taken = {"cpu": (time.process_time() - cpu) / steps, "clock": (time.perf_counter() - clock) / steps}
        say({**taken, "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss})


def say(answer: dict[str, float]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
