"""python -m tests.performance.ranks: what exact sums cost, how updates scale with ranks, and order-free streaming.

Everything is measured in pairs, in turns, and reported as medians of ratios with the least and the most; CPU seconds
stand beside wall clock, because they stay true on a machine that is busy with other things.

    sums     an update that adds gradients exactly ÷ the same one that leaves the adding to autograd, as floats
    updates  updates per second of 1 and 2 ranks of one thread each ÷ those of a bare loop with 1 and 2 threads
    order    a step that trains groups as they get ready ÷ one that takes them in order, rewards of CV 1
"""

import argparse
import asyncio
import hashlib
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from async_flowrl.algorithms.registry import build_algorithm
from async_flowrl.benchmark.table import markdown_table
from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.controller.handed import HandedGroup, hand_over
from async_flowrl.controller.replica_calls import now
from async_flowrl.controller.trainer import TrainerGroup
from async_flowrl.run.prepare import Prepared, prepare
from async_flowrl.tickets.arithmetic import trained_steps
from async_flowrl.training import update as update_module
from async_flowrl.training.exact import ExactSum
from async_flowrl.training.messages import StepPlan, TrainRequest
from async_flowrl.types import ByteArray, Prompt
from separation.rendezvous import join_process_group
from tests.performance.engines import Workers, bare_of, timed
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
MEAN_WAIT = 0.4
"""Seconds of a reward, drawn exponentially: their coefficient of variation is 1."""
ORDER_RUN = (
    "total_steps=10",
    "prompts_per_step=8",
    "group_size=8",
    "trainer.micro_batch_size=8",
    "reward.num_workers=4",
    "save.every=0",
    "evaluate.before_training=false",
    "console=quiet",
    "monitor.report=false",
    "~reward.terms.color",
    "+reward.terms={waiting: {name: 'tests.performance.ranks:Waiting'}}",
)
WARM_UP = 2
Times = tuple[float, float]
"""Wall clock, CPU seconds."""


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


def sums(rounds: int) -> Iterator[tuple[str, ...]]:
    """Rows of the table: model, exact ÷ floats by wall clock, by CPU seconds."""
    torch.set_num_threads(1)
    for name, overrides in MODELS.items():
        prepared, steps = prepared_for(overrides), {}
        for kind in (ExactSum, PlainFloats):
            with adding(kind):
                workers = Workers(prepared)
            workers.generate()
            steps[kind] = step_of(workers)
        taken = [{kind: timed(step) for kind, step in steps.items()} for _ in range(rounds + 1)][1:]
        trained = workers.trainer.parameters.numel
        yield f"{name}, {trained:,} trained", *in_pairs([(t[ExactSum], t[PlainFloats]) for t in taken])


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


async def updates(rounds: int) -> list[tuple[str, ...]]:
    """Rows of the table: what, rate ÷ that of the bare loop by wall clock, by CPU seconds."""
    torch.set_num_threads(1)
    found: list[tuple[str, ...]] = []
    for name, overrides in MODELS.items():
        given = [*overrides, "trainer.timesteps_per_forward=null"]
        prepared = prepared_for(given)
        workers = Workers(prepared)
        workers.generate()
        loop = "tests.performance.ranks:BareLoop"
        bare = {n: ProcessPool("bare", 1, loop, {"overrides": given, "threads": n}) for n in (1, 2)}
        ranks = {n: Ranks(prepared, n) for n in (1, 2)}
        try:
            for each in ranks.values():
                await each.load()
            taken = []
            for _ in range(rounds + 1):
                one = {("bare", n): await pool.workers[0].call("update") for n, pool in bare.items()}
                taken.append(one | {("ranks", n): await each.update(workers) for n, each in ranks.items()})
        finally:
            for pool in (*bare.values(), *(each.pool for each in ranks.values())):
                await pool.close()
        taken = taken[1:]
        for n in (1, 2):
            pairs = [(t["bare", n], t["ranks", n]) for t in taken]
            found.append((f"{name}: {n} rank(s) of 1 thread ÷ bare loop of {n}", *in_pairs(pairs)))
        twice = [(t["ranks", 1], t["ranks", 2]) for t in taken]
        found.append((f"{name}: 2 ranks ÷ 1 rank (2 is linear)", *in_pairs(twice)))
    return found


class Waiting:
    """A reward that answers after an exponentially distributed time, by the images alone."""

    deterministic = True

    def __call__(self, images: ByteArray, prompt: Prompt) -> list[float]:
        digest = hashlib.blake2b(images.tobytes(), digest_size=8).digest()
        time.sleep(MEAN_WAIT * random.Random(digest).expovariate(1.0))
        return [float(image.mean()) / 255 for image in images]


async def in_order(self: TrainerGroup, ctx: Any, step: int, size: int) -> AsyncIterator[Sequence[HandedGroup]]:
    """What `TrainerGroup._ready` was when the groups of a step were trained in the order of their numbers."""
    self._owners.begin(size, now())
    for group in range(size):
        await self._until(ctx, lambda: ctx.table.ready(step, group))  # noqa: B023
        while all(replica.waiting for replica in self._alive):
            self._freed.clear()
            await self._freed.wait()
        yield self._owned(ctx, hand_over(ctx, self.algorithm, step, [group]))


def one_run(mode: str, order: str, folder: Path) -> float:
    """Mean seconds of the steps of a run after the first ones."""
    command = [sys.executable, "-m", __spec__.name, "--run", order, "--config-name", mode, *ORDER_RUN]
    subprocess.run([*command, f"output_dir={folder}"], check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = [line["timing/step"] for line in lines[WARM_UP:]]
    return math.fsum(times) / len(times)


def order(rounds: int) -> Iterator[tuple[str, ...]]:
    """Rows of the table: mode, step time in any order ÷ in order, seconds of both."""
    for mode in ("stream", "one_step_off"):
        pairs = []
        with tempfile.TemporaryDirectory() as scratch:
            for number in range(rounds):
                found = {o: one_run(mode, o, Path(scratch) / f"{o}-{number}") for o in ("any", "in-order")}
                pairs.append((found["any"], found["in-order"]))
        ratios = [after / before for after, before in pairs]
        after, before = (median(pair[place] for pair in pairs) for place in (0, 1))
        yield mode, spread(ratios), f"{before:.2f} → {after:.2f} s"


def in_pairs(pairs: Sequence[tuple[Times, Times]]) -> tuple[str, str]:
    """The first ÷ the second of each pair: by wall clock, by CPU seconds."""
    wall, cpu = ([above[place] / below[place] for above, below in pairs] for place in (0, 1))
    return spread(wall), spread(cpu)


def spread(values: Sequence[float]) -> str:
    return f"{median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--run"]:
        return run_as(given[1], given[2:])
    parser = argparse.ArgumentParser(prog="python -m tests.performance.ranks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="pairs of updates (default 12)")
    parser.add_argument("--runs", type=int, default=2, help="pairs of whole runs of each mode (default 2)")
    parser.add_argument("--only", choices=("sums", "updates", "order"), action="append")
    options = parser.parse_args(given)
    chosen = options.only or ("sums", "updates", "order")
    if "sums" in chosen:
        show(("an update, exact ÷ float sums", "wall clock", "CPU seconds"), sums(options.rounds))
    if "updates" in chosen:
        rows = asyncio.run(updates(options.rounds))
        show(("updates per second", "wall clock", "CPU seconds"), rows)
    if "order" in chosen:
        show(("step, any order ÷ in order", "wall clock", "medians"), order(options.runs))
    return 0


def show(head: tuple[str, ...], rows: Any) -> None:
    sys.stdout.write(f"{markdown_table(head, list(rows))}\n\n")
    sys.stdout.flush()


def run_as(how: str, words: Sequence[str]) -> int:
    """A training run, with groups taken in order if `how` says so."""
    from async_flowrl import main as program

    if how == "in-order":
        TrainerGroup._ready = in_order  # type: ignore[method-assign, assignment]
    sys.argv = ["async_flowrl.main", *words]
    return program.main()


if __name__ == "__main__":
    sys.exit(main())
