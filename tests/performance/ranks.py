"""python -m tests.performance.ranks: what exact sums cost, how updates scale with ranks, and order-free streaming.

Everything is measured in pairs, in turns, and reported as medians of ratios with the least and the most; CPU seconds
stand beside wall clock, because they stay true on a machine that is busy with other things.

    sums     an update that adds gradients exactly ÷ the same one that leaves the adding to autograd, as floats
    updates  updates per second of 1 and 2 ranks of one thread each ÷ those of a bare loop with 1 and 2 threads
    order    a step that trains groups as they get ready ÷ one that takes them in order, rewards of CV 1

What is measured now is said on stderr, and each row is printed as soon as it is known. With `--rounds 8 --runs 1` all
of it takes less than eight minutes on a quiet machine of two cores.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from async_flowrl.controller.replica_calls import now
from torch import Tensor

from async_flowrl.algorithms.registry import build_algorithm
from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.controller.handed import HandedGroup
from async_flowrl.controller.trainer import TrainerGroup
from async_flowrl.run.prepare import Prepared, prepare
from async_flowrl.tickets.arithmetic import trained_steps
from async_flowrl.training import update as update_module
from async_flowrl.training.exact import ExactSum
from async_flowrl.training.messages import StepPlan, TrainRequest
from separation.rendezvous import join_process_group
from tests.performance.engines import Workers, bare_of, timed
from tests.performance.order import order
from tests.performance.paired import Progress, Times, in_pairs, rounds_within, show
from tests.support.process_pool import ProcessPool
from tests.support.toy_pool import ListObserver

MODELS = {
    "tiny": ("experiment=two_prompts",),
    "largest": (
        "experiment=two_prompts",
        f"model.path={Path(__file__).parents[2] / 'examples' / 'glyphs' / 'weights'}",
        "rollout.resolution=64",
        "lora={rank: 16, alpha: 32}",
        "group_size=8",
        "trainer.micro_batch_size=8",
    ),
}
"""What is updated: the smallest recipe, and the largest network that is shipped."""
SUMS_SECONDS, UPDATES_SECONDS = 25.0, 50.0
"""Time limits of a model's rounds: of `sums`, and of `updates` (paired.rounds_within)."""


class PlainFloats(ExactSum):
    """Gradients are added by autograd where they arise, and divided at the end; nothing else is done to them."""

    def add(self, gradient: Tensor) -> Tensor:
        return gradient.new_zeros(())

    def mean(self, out: Tensor, rows: int) -> None:
        out.div_(rows)


@contextmanager
def adding(kind: type[ExactSum]) -> Iterator[None]:
    """Trainer ranks that load inside add in this way."""
    before = update_module.ExactSum
    update_module.ExactSum = kind  # type: ignore[misc]
    try:
        yield
    finally:
        update_module.ExactSum = before  # type: ignore[misc]


def prepared_for(overrides: Sequence[str]) -> Prepared:
    return prepare(compose_config("one_step_off", [*overrides, "output_dir=outputs/none"]))


def step_of(workers: Workers) -> Callable[[], None]:
    """One update on the same images each time."""
    config, trainer = workers.config, workers.trainer
    tickets, batch = workers.tickets(0), workers.batches[0]
    rows = config.prompts_per_step * config.group_size * trained_steps(config)

    def step() -> None:
        version = trainer.versions.newest
        trainer.update.begin(version, StepPlan(rows=rows, probe=False))
        for ticket, trajectory in zip(tickets, batch, strict=True):
            meta = replace(workers.meta(ticket), version=version, age=0)
            trainer.update.accumulate([meta], trajectory)
        trainer.train(TrainRequest(version, (), finishes=True))

    return step


def sums(rounds: int, progress: Progress) -> Iterator[tuple[str, ...]]:
    """Yields rows of the table, one per model: exact ÷ floats by wall clock, by CPU seconds."""
    torch.set_num_threads(1)
    for name, overrides in MODELS.items():
        prepared, steps = prepared_for(overrides), {}
        for kind in (ExactSum, PlainFloats):
            with adding(kind):
                workers = Workers(prepared)
            workers.generate()
            steps[kind] = step_of(workers)
        numbers = rounds_within(rounds, SUMS_SECONDS, progress, f"sums, {name}")
        taken = [{kind: timed(step) for kind, step in steps.items()} for _ in numbers][1:]
        trained = f"{name}, {workers.trainer.parameters.numel:,} trained, {len(taken)} rounds"
        yield trained, *in_pairs([(t[ExactSum], t[PlainFloats]) for t in taken])


class BareLoop:
    """A process with a bare loop of some threads."""

    def __init__(self, overrides: Sequence[str], threads: int, index: int, name: str) -> None:
        torch.set_num_threads(threads)
        prepared = prepared_for(overrides)
        config = prepared.config
        workers = Workers(prepared)
        self.bare = bare_of(prepared, workers)
        texts = [prepared.requests.prompt(ticket).text for ticket in workers.tickets(0)]
        self.groups = [self.bare.generate(text, config.group_size)[1] for text in texts]
        self.count = trained_steps(config)
        self.at_once = config.trainer.timesteps_per_forward or self.count

    def update(self) -> Times:
        return timed(lambda: self.bare.update(self.groups, trained=self.count, at_once=self.at_once))


class Ranks:
    """Trainer ranks in processes of one thread each, and the controller's part of an update, in this process."""

    def __init__(self, prepared: Prepared, ranks: int) -> None:
        self.config: Config = replace(
            prepared.config, trainer=replace(prepared.config.trainer, num_workers=ranks, shard="none")
        )
        self.requests = prepared.requests
        arguments = {"config": self.config, "model": prepared.model}
        self.pool = ProcessPool("trainer", ranks, "async_flowrl.training.worker:TrainerWorker", arguments)
        self.trainers = TrainerGroup(self.pool, build_algorithm(self.config))
        self.step = 0

    async def load(self) -> None:
        if len(self.pool.workers) > 1:
            await join_process_group(self.pool, timeout=300)
        infos = await self.trainers.all("load")
        self.trainers.laid_out(self.config, infos[0]["ranks_per_replica"])
        self.ctx: Any = SimpleNamespace(
            config=self.config,
            observer=ListObserver(),
            requests=self.requests,
            base_digest=infos[0]["base_digest"],
            table=SimpleNamespace(ready_groups=lambda step: []),
        )

    async def update(self, workers: Workers) -> Times:
        """On the images of `workers`; CPU seconds are those of all ranks."""
        handed = []
        for ticket, trajectory in zip(workers.tickets(0), workers.batches[0], strict=True):
            ticket.payload = (None, trajectory)
            meta = replace(workers.meta(ticket), version=self.step, age=0)
            handed.append(HandedGroup([ticket], None, meta.advantages, meta))
        before, began = await self._cpu(), time.perf_counter()
        self.trainers._owners.begin(len(handed), now())
        owned = self.trainers._owned(self.ctx, handed)
        await self.trainers._optimizer_step(self.ctx, self.step, 0, len(owned), self.trainers._taken(owned))
        wall = time.perf_counter() - began
        self.step += 1
        return wall, await self._cpu() - before

    async def _cpu(self) -> float:
        return sum(await self.trainers.all("time:process_time"))


def updates(rounds: int, progress: Progress) -> Iterator[tuple[str, ...]]:
    """Yields rows of the table, three per model: what, rate ÷ rate by wall clock, by CPU seconds."""
    torch.set_num_threads(1)
    for name, overrides in MODELS.items():
        taken = asyncio.run(updates_of([*overrides, "trainer.timesteps_per_forward=null"], rounds, progress, name))
        for n in (1, 2):
            pairs = [(t["bare", n], t["ranks", n]) for t in taken]
            yield f"{name}: {n} rank(s) of 1 thread ÷ bare loop of {n}, {len(taken)} rounds", *in_pairs(pairs)
        twice = [(t["ranks", 1], t["ranks", 2]) for t in taken]
        yield f"{name}: 2 ranks ÷ 1 rank (2 is linear)", *in_pairs(twice)


async def updates_of(
    overrides: Sequence[str], rounds: int, progress: Progress, name: str
) -> list[dict[tuple[str, int], Times]]:
    """Returns the times of an update by (what, its number of ranks or threads), one dictionary per counted round."""
    prepared = prepared_for(overrides)
    workers = Workers(prepared)
    workers.generate()
    loop = "tests.performance.ranks:BareLoop"
    bare = {n: ProcessPool("bare", 1, loop, {"overrides": overrides, "threads": n}) for n in (1, 2)}
    ranks = {n: Ranks(prepared, n) for n in (1, 2)}
    try:
        for each in ranks.values():
            await each.load()
        taken = []
        for _ in rounds_within(rounds, UPDATES_SECONDS, progress, f"updates, {name}"):
            one = {("bare", n): await pool.workers[0].call("update") for n, pool in bare.items()}
            taken.append(one | {("ranks", n): await each.update(workers) for n, each in ranks.items()})
    finally:
        for pool in (*bare.values(), *(each.pool for each in ranks.values())):
            await pool.close()
    return taken[1:]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.performance.ranks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="most pairs of updates (default 12)")
    parser.add_argument("--runs", type=int, default=2, help="pairs of whole runs of each mode (default 2)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a whole run, at least 3 (default 10)")
    parser.add_argument("--only", choices=("sums", "updates", "order"), action="append")
    options = parser.parse_args(arguments)
    chosen, progress = options.only or ("sums", "updates", "order"), Progress()
    if "sums" in chosen:
        show(("an update, exact ÷ float sums", "wall clock", "CPU seconds"), sums(options.rounds, progress))
    if "updates" in chosen:
        show(("updates per second", "wall clock", "CPU seconds"), updates(options.rounds, progress))
    if "order" in chosen:
        show(("step, any order ÷ in order", "wall clock", "medians"), order(options.runs, options.steps, progress))
    return 0


if __name__ == "__main__":
    sys.exit(main())
