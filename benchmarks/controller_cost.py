"""python -m benchmarks.controller_cost: what the controller costs per ticket, with up to 1,000 workers.

The real loop, dispatch, tickets, trainer group, publisher, delivery and event log run in virtual time; only what
runs in other processes is replaced by objects that answer at once. So the CPU time is the controller's own, without the
cost of Ray's calls.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from async_flowrl.config.schema import Config, DeadlinesConfig
from async_flowrl.controller.context import Context
from async_flowrl.observability.events import EventLog
from async_flowrl.observability.ledger import PoolLedger
from async_flowrl.run.loop import run
from async_flowrl.tickets.table import Shape, TicketTable
from async_flowrl.training.messages import Manifest, StepPlan, TrainRequest, UpdateStats
from async_flowrl.training.parts import World, parts_of
from async_flowrl.types import Prompt, RolloutReport, RolloutRequest, Scores, Trajectory
from benchmarks.markdown_tables import markdown_table
from checkpoint_engine import RING, Ack, Header, Layout, binding_probe, proof_tensors
from tests.support.toy import toy_config, toy_context
from tests.support.toy_weights import ToySender, toy_lora, toy_tensors
from tests.support.virtual import VirtualPool, VirtualWorker, run_virtual

WORKERS = (10, 30, 100, 300, 1000)
STEPS, WARM_UP_STEPS = 6, 2
WARM_UP_WORKERS = 50
"""Of a measurement thrown away: imports and caches."""
SECONDS = {"generate": 10.0, "score": 0.5, "train": 0.01, "receive": 0.1}
"""Virtual seconds per call of a worker; what is not named takes none."""
PACE_DIFFERENCE = 1e-3
"""Relative, between neighbours in a pool: no two results arrive in the same instant."""
MODES = ((0, "batch"), (1, "stream"))
"""(max_staleness, hand_over): all workers wait at the gate together, and none does."""


@dataclass(frozen=True)
class Cost:
    """Of the steps after the warm-up."""

    workers: int
    max_staleness: int
    hand_over: str
    tickets: int
    cpu_per_ticket: float
    """Seconds; one core keeps up with its inverse of tickets per second."""
    bytes_per_ticket: float
    """Memory of a ticket waiting in the table."""
    ranks: int = 1
    """Of the trainer."""


class AnsweringRollout:
    """A rollout worker that answers at once and computes nothing; it holds whatever it is sent."""

    trajectory = Trajectory(np.zeros((4, 8), np.float32), (0, 1), (0,), np.zeros((4, 1)), np.zeros(2), {})

    def __init__(self) -> None:
        self.receiver = self
        self.digests: dict[tuple[int, str], str] = {}

    def load(self) -> dict[str, str]:
        return {"base_digest": "toy"}

    def receive(self, header: Header, payload: Any, slot: str = RING) -> Ack:
        self.digests[header.version, slot] = header.digest
        self.header, self.payload = header, payload
        return Ack(header.stream, header.version, header.digest, slot)

    def export(self, stream: str, version: int, slot: str) -> tuple[Header, Any]:
        return self.header, self.payload

    def prove(self, version: int) -> dict[str, torch.Tensor]:
        return probe_of_proof(self.header.layout)

    def generate(self, requests: Sequence[RolloutRequest]) -> tuple[list[RolloutReport], Any, Trajectory]:
        (request,) = requests
        count, digest = len(request.images), self.digests[request.version, RING]
        report = RolloutReport(request.ordinal, request.version, digest, count, ())
        return [report], blank_images(count), self.trajectory


@lru_cache
def probe_of_proof(layout: Layout) -> dict[str, torch.Tensor]:
    return binding_probe(toy_lora(proof_tensors(layout, 1)))


@lru_cache
def blank_images(count: int) -> Any:
    """uint8 [count, 1, 1, 8], black but for the first pixel of each, so that rewards differ."""
    images = np.zeros((count, 1, 1, 8), np.uint8)
    images[:, 0, 0, 0] = range(count)
    return images


class AnsweringReward:
    def score(self, terms: Sequence[str], prompt: Prompt, *images: Any) -> Scores:
        values = (0.0, 1.0)
        return Scores(values, {"color": values})


class AnsweringTrainer:
    """A trainer rank with real staging and sealing of a very small adapter, and no training.

    Of several ranks, each answers which parts it was given, as real ones do; their sums are checked against the plan.
    """

    def __init__(self, config: Config, index: int) -> None:
        tensors = toy_tensors()
        self.sender = ToySender(tensors, dict.fromkeys(range(STEPS + 1), tensors), {}, config.live_versions)
        self.update = self
        self._place = World(index, config.trainer.num_workers)
        self._step, self._plan = -1, StepPlan(rows=0)
        self._parts: list[tuple[int, int]] = []

    def train(self, request: TrainRequest, *trajectories: Any) -> Manifest:
        """Nothing is trained."""
        self._begin(request)
        own = parts_of(request.metas, self._place)
        self._parts += [(request.metas[part.group].group, part.part) for part in own]
        return Manifest(self._step, self._plan.update, self._plan.attempt, tuple(self._parts))

    def add_up(self, request: TrainRequest, *trajectories: Any) -> int | None:
        self._begin(request)
        return None

    def take_step(self) -> UpdateStats:
        return UpdateStats(self._step, self._plan.update, False, {"loss": 0.0})

    def _begin(self, request: TrainRequest) -> None:
        if request.begins is not None:
            self._step, self._plan, self._parts = request.step, request.begins, []


class TimedWorker(VirtualWorker):
    def duration(self, method: str, args: tuple[Any, ...]) -> float:
        return SECONDS.get(method.rpartition(".")[2], 0.0) * (1.0 + PACE_DIFFERENCE * self.index)


@dataclass
class Clocked:
    """Reads the CPU clock at the end of each step. Nothing is evaluated or saved."""

    ends: list[float] = field(default_factory=list)

    async def before_training(self, ctx: Context) -> None:
        pass

    async def drain(self, ctx: Context) -> None:
        pass

    async def after_step(self, ctx: Context, step: int, stats: dict[str, float]) -> None:
        self.ends.append(time.process_time())


def measure(workers: int, max_staleness: int = 1, hand_over: str = "stream", *, ranks: int = 1) -> Cost:
    """One ticket per worker and step; the CPU seconds of the steps after the warm-up."""
    config = toy_config(
        max_staleness,
        hand_over=hand_over,
        steps=STEPS,
        prompts_per_step=workers,
        group_size=2,
        rollout__num_workers=workers,
        reward__num_workers=max(1, workers // 10),
        trainer__num_workers=ranks,
        deadlines=DeadlinesConfig(**{deadline.name: 1e12 for deadline in fields(DeadlinesConfig)}),
    )
    with tempfile.TemporaryDirectory() as directory:
        clocked = run_virtual(_run(config, Path(directory) / "events.jsonl"), horizon=1e12)
    tickets = workers * (STEPS - WARM_UP_STEPS)
    cpu = (clocked.ends[-1] - clocked.ends[WARM_UP_STEPS - 1]) / tickets
    return Cost(workers, max_staleness, hand_over, tickets, cpu, bytes_per_ticket(workers), ranks)


def bytes_per_ticket(workers: int) -> float:
    """Of a table that holds two steps' tickets."""
    tracemalloc.start()
    table = TicketTable(Shape(1, workers, STEPS, 1))
    before, _ = tracemalloc.get_traced_memory()
    table.publish(0, "digest")
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / len(list(table.live()))


async def _run(config: Config, events: Path) -> Clocked:
    targets = {
        "trainer": [AnsweringTrainer(config, index) for index in range(config.trainer.num_workers)],
        "rollout": [AnsweringRollout() for _ in range(config.rollout.num_workers)],
        "reward": [AnsweringReward() for _ in range(config.reward.num_workers)],
    }
    pools = {
        name: VirtualPool(name, [TimedWorker(name, index, target) for index, target in enumerate(of_pool)])
        for name, of_pool in targets.items()
    }
    texts, clock, clocked = [f"prompt {index}" for index in range(100)], asyncio.get_running_loop().time, Clocked()
    with closing(EventLog(events, clock, ledger=PoolLedger(clock))) as log:
        await run(*toy_context(config, pools, log, texts), clocked)
    return clocked


def markdown(costs: Sequence[Cost]) -> str:
    rates = ("CPU ms per ticket", "tickets/s on one core", "bytes per waiting ticket")
    rows = [
        f"{cost.workers} {cost.ranks} {cost.max_staleness} {cost.hand_over} {1e3 * cost.cpu_per_ticket:.2f} "
        f"{1 / cost.cpu_per_ticket:.0f} {cost.bytes_per_ticket:.0f}".split()
        for cost in costs
    ]
    return markdown_table(("workers", "ranks", "max_staleness", "hand_over", *rates), rows) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.controller_cost")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--ranks", type=int, default=1, help="trainer ranks")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    measure(WARM_UP_WORKERS)
    costs = [measure(count, *mode, ranks=given.ranks) for mode in MODES for count in given.workers]
    sys.stdout.write(json.dumps([asdict(cost) for cost in costs], indent=2) + "\n" if given.json else markdown(costs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
