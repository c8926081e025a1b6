"""python -m tests.performance.controller: what the controller costs per ticket, with up to 1,000 workers.

The real loop, dispatch, tickets, trainer group, publisher, delivery and event log, in virtual time; only what
runs in other processes is replaced by workers that answer at once. So the CPU time is the controller's own, without the
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
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, cast

import torch

from async_flowrl.algorithms.registry import build_algorithm
from async_flowrl.config.schema import Config, DeadlinesConfig, RewardTerm
from async_flowrl.controller.context import Context
from async_flowrl.controller.trainer import TrainerGroup
from async_flowrl.controller.weights import PublishedWeights
from async_flowrl.loop import run
from async_flowrl.observability.events import EventLog
from async_flowrl.observability.ledger import PoolLedger
from async_flowrl.plan.virtual_time import run_virtual
from async_flowrl.plan.work import FOREVER
from async_flowrl.tickets.arithmetic import shape
from async_flowrl.tickets.request import RequestBuilder
from async_flowrl.tickets.table import Shape, TicketTable
from async_flowrl.tickets.ticket import record
from async_flowrl.training.messages import Part, UpdateStats
from async_flowrl.types import Prompt, RolloutReport, RolloutRequest, Scores
from checkpoint_engine import CANARY_VERSION, Ack, Header, Publisher
from separation.group import PoolSpec, WorkerGroup

WORKERS = (10, 30, 100, 300, 1000)
STEPS, WARM_UP = 6, 2
WARM_UP_WORKERS = 50
"""Of a measurement thrown away: imports and caches."""
SECONDS = {"generate": 10.0, "score": 0.5, "train": 0.01, "receive": 0.1}
"""Virtual seconds per call of a worker; what is not named takes none."""
APART = 1e-3
"""Relative difference between the paces of neighbours: no two results arrive in the same instant."""
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
    """Seconds."""
    tickets_per_s: float
    """What one core keeps up with."""
    bytes_per_ticket: float
    """Memory of a ticket waiting in the table."""


class Rollouts:
    """What a rollout worker answers; it holds whatever it is sent."""

    def __init__(self) -> None:
        self.digests: dict[int, str] = {}

    def receive(self, header: Header, payload: Any, slot: str) -> Ack:
        self.digests[header.version] = header.digest
        return Ack(header.stream, header.version, header.digest, slot)

    def relay(self, header: Header, slot: str) -> tuple[None, None]:
        return None, None

    def prove(self, version: int) -> dict[str, torch.Tensor]:
        return {}

    def generate(self, request: RolloutRequest) -> tuple[RolloutReport, None, None]:
        digest = self.digests[request.version]
        return RolloutReport(request.ordinal, request.version, digest, len(request.images), ()), None, None


class Rewards:
    def score(self, prompt: Prompt, *images: Any) -> Scores:
        values = (0.0, 1.0)
        return Scores(values, {"color": values})


class Ranks:
    """The trainer: real staging and sealing of a very small adapter, no training."""

    def __init__(self, config: Config) -> None:
        self.tensors = {"layer.lora_A.weight": torch.zeros(1, 8), "layer.lora_B.weight": torch.zeros(8, 1)}
        self.publisher = Publisher(self.tensors, alpha=1.0, rank=1, retain=config.max_staleness + 1)

    def train(self, part: Part, *trajectories: Any) -> UpdateStats | None:
        """Nothing is trained."""
        return UpdateStats(part.step, 0, False, {"loss": 0.0}) if part.finishes else None

    def canary(self) -> dict[str, torch.Tensor]:
        self.publisher.stage(CANARY_VERSION, self.tensors)
        return {}

    def stage(self, version: int, stream: str) -> None:
        self.publisher.stage(version, self.tensors)

    def seal(self, version: int, stream: str) -> Header:
        return self.publisher.seal(version)

    def payload(self, version: int, stream: str) -> Any:
        return self.publisher.payload(version)

    def hold(self, version: int, stream: str) -> None:
        self.publisher.hold(version)

    def release(self, version: int, stream: str) -> None:
        self.publisher.release(version)


class AnsweringWorker:
    """Runs a method of its target after its virtual seconds have passed."""

    pid, node = 0, "virtual"

    def __init__(self, pool: str, index: int, target: Any) -> None:
        self.pool, self.index, self.name, self.target = pool, index, f"{pool}-{index}", target

    async def call(self, method: str, *args: Any, lane: str = "main") -> Any:
        await asyncio.sleep(SECONDS.get(method, 0.0) * (1.0 + APART * self.index))
        return getattr(self.target, method)(*args)

    async def call_split(self, method: str, *args: Any, returns: int, lane: str = "main") -> tuple[Any, Any]:
        first, *rest = await self.call(method, *args)
        return first, tuple(rest)

    async def watch(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets that event")

    def kill(self) -> None:
        """There is no process."""


@dataclass
class AnsweringGroup:
    spec: PoolSpec
    workers: list[AnsweringWorker]


@dataclass
class Clocked:
    """Steps: reads the CPU clock at the end of each."""

    ends: list[float] = field(default_factory=list)

    async def before_training(self, ctx: Context) -> None:
        """Nothing is evaluated or saved."""

    async def after_step(self, ctx: Context, step: int, stats: dict[str, float]) -> None:
        self.ends.append(time.process_time())

    async def drain(self, ctx: Context) -> None:
        """Nothing is left."""

    def abandon(self) -> None:
        """Nothing is outstanding."""


def measure(workers: int, max_staleness: int = 1, hand_over: str = "stream") -> Cost:
    """One ticket per worker and step; the CPU seconds of the steps after the warm-up."""
    config = _config(workers, max_staleness, hand_over)
    with tempfile.TemporaryDirectory() as directory:
        clocked = run_virtual(_run(config, Path(directory) / "events.jsonl"), horizon=FOREVER)
    tickets = workers * (STEPS - WARM_UP)
    cpu = (clocked.ends[-1] - clocked.ends[WARM_UP - 1]) / tickets
    return Cost(workers, max_staleness, hand_over, tickets, cpu, 1.0 / cpu, bytes_per_ticket(workers))


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
    ranks = Ranks(config)
    pools: dict[str, list[Any]] = {
        "trainer": [ranks],
        "rollout": [Rollouts() for _ in range(config.rollout.num_workers)],
        "reward": [Rewards() for _ in range(config.reward.num_workers)],
    }
    groups = {
        pool: AnsweringGroup(PoolSpec(pool, "", len(found)), [AnsweringWorker(pool, i, t) for i, t in enumerate(found)])
        for pool, found in pools.items()
    }
    algorithm = build_algorithm(
        config.algorithm,
        max_staleness=config.max_staleness,
        updates_per_batch=1,
        hand_over=config.hand_over,
        num_inference_steps=config.rollout.num_inference_steps,
    )
    clock = asyncio.get_running_loop().time
    with EventLog(events, clock, ledger=PoolLedger(clock)) as log:
        trainers = TrainerGroup(cast("WorkerGroup", groups["trainer"]), algorithm)
        weights, clocked = PublishedWeights(trainers), Clocked()
        table = TicketTable(shape(config), on_change=lambda ticket: log.event("ticket", **record(ticket)))
        prompts = [Prompt(index, f"prompt {index}") for index in range(100)]
        ctx = Context(
            config=config,
            requests=RequestBuilder(config, prompts, prompts[:1]),
            table=table,
            rollout=cast("WorkerGroup", groups["rollout"]),
            reward=cast("WorkerGroup", groups["reward"]),
            trainer=trainers,
            weights=weights,
            observer=log,
            steps=clocked,
            base_digest="",
        )
        weights.ctx = ctx
        for worker in groups["rollout"].workers:
            table.join(worker.name)
        await run(ctx)
    return clocked


def _config(workers: int, max_staleness: int, hand_over: str) -> Config:
    config = Config(total_steps=STEPS, prompts_per_step=workers, group_size=2)
    config.max_staleness, config.hand_over = max_staleness, hand_over
    config.rollout.num_workers, config.reward.num_workers = workers, max(1, workers // 10)
    config.reward.terms = {"color": RewardTerm()}
    config.evaluate.before_training = False
    config.deadlines = DeadlinesConfig(**{deadline.name: FOREVER for deadline in fields(DeadlinesConfig)})
    return config


def markdown(costs: Sequence[Cost]) -> str:
    head = (
        "| workers | max_staleness | hand_over | CPU ms per ticket | tickets/s on one core | bytes per waiting ticket |"
    )
    lines = [head, "|" + "---|" * 6]
    lines += [
        f"| {cost.workers} | {cost.max_staleness} | {cost.hand_over} | {1e3 * cost.cpu_per_ticket:.2f} "
        f"| {cost.tickets_per_s:.0f} | {cost.bytes_per_ticket:.0f} |"
        for cost in costs
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.performance.controller")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    measure(WARM_UP_WORKERS)
    costs = [measure(count, *mode) for mode in MODES for count in given.workers]
    sys.stdout.write(json.dumps([asdict(cost) for cost in costs], indent=2) + "\n" if given.json else markdown(costs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
