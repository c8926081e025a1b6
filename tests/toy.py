"""The real controller on toy workers in virtual time: real tickets, gate, loop, delivery and receivers; a policy of a few
numbers in place of the network, and sleeps in place of compute. The weights depend on every image, its noise, its version
and the order of training, so that equal digests mean equal runs."""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from async_flowrl.algorithms.registry import build_algorithm
from async_flowrl.config import Config, DeadlinesConfig, EvaluateConfig, RewardConfig, RewardTerm
from async_flowrl.context import Context
from async_flowrl.evaluation import EvaluationResult, Evaluations
from async_flowrl.loop import run
from async_flowrl.recipe import Recipe, shape
from async_flowrl.seeds import generator
from async_flowrl.tickets import TicketTable
from async_flowrl.training.gang import TrainerGang
from async_flowrl.training.plan import GroupMeta, StepPlan, UpdateStats
from async_flowrl.types import EVALUATION, Prompt, RolloutReport, RolloutRequest, Scores, Trajectory
from async_flowrl.weights import PublishedWeights
from checkpoint_engine import (
    CANARY_VERSION,
    RING,
    Ack,
    Header,
    LoraModule,
    Publisher,
    Receiver,
    binding_probe,
    canary_tensors,
    weights_digest,
)
from checkpoint_engine import EVALUATION as EVALUATION_SLOT
from separation.group import PoolSpec, WorkerDied, WorkerFailed
from tests.virtual import run_virtual

SIZE = 8


def toy_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """One LoRA layer "layer": A random, B zero, as at the start of a real run."""
    return {
        "layer.lora_A.weight": torch.randn(2, SIZE, generator=generator(seed)),
        "layer.lora_B.weight": torch.zeros(SIZE, 2),
    }


def toy_lora(tensors: Mapping[str, torch.Tensor]) -> dict[str, LoraModule]:
    return {"layer": LoraModule(tensors["layer.lora_A.weight"], tensors["layer.lora_B.weight"], 2.0)}


class ToyRollout:
    """Images are one byte per pixel of a number computed from the live weights and the image's noise."""

    def __init__(self, config: Config, index: int, name: str) -> None:
        self.config, self.name = config, name
        self.tensors = toy_tensors(config.seed)
        self.receiver = Receiver(self.tensors, capacity=config.max_staleness + 1, alpha=4.0, rank=2)
        self.watermarks: list[tuple[int, str, str]] = []
        """(version asked for, digest reported, digest of the live bytes at the end) of every ticket."""

    def load(self) -> dict[str, str]:
        return {"base_digest": "toy"}

    def receive(self, header: Header, buffer: Any, slot: str = RING) -> Ack:
        return self.receiver.receive(header, buffer, slot)

    def prove(self, version: int) -> Any:
        self.receiver.activate("policy", version)
        return binding_probe(toy_lora(self.tensors))

    def generate(self, request: RolloutRequest) -> tuple[RolloutReport, Any, Trajectory | None]:
        slot = EVALUATION_SLOT if request.kind == EVALUATION else RING
        digest = self.receiver.activate("policy", request.version, slot=slot)
        a, b = (self.tensors[f"layer.lora_{x}.weight"] for x in "AB")
        noise = torch.stack([torch.randn(SIZE, generator=generator(s)) for s in request.initial_seeds])
        values = noise + 2.0 * noise @ a.T @ b.T
        images = (torch.sigmoid(values) * 255).to(torch.uint8).numpy().reshape(len(values), 1, 1, SIZE)
        trajectory = Trajectory(values.numpy(), (0, 1), (0,), values[:, :1].numpy(), np.zeros(2, np.float32), {})
        self.watermarks.append((request.version, digest, self.receiver.live_digest()))
        report = RolloutReport(request.ordinal, request.version, digest, len(images), ())
        return report, images, None if request.kind == EVALUATION else trajectory


class ToyReward:
    def __init__(self, config: Any, index: int, name: str) -> None:
        self.name = name

    def score(self, prompt: Prompt, *images: Any) -> Scores:
        values = tuple(float(x.mean()) for image in images for x in image)
        return Scores(values, {"color": values})


class ToyTrainer:
    """One gradient step per batch on a made-up loss in which every trajectory and advantage counts."""

    def __init__(self, config: Config, index: int, name: str) -> None:
        self.config = config
        self.tensors = toy_tensors(config.seed)
        self.publisher = Publisher(self.tensors, alpha=4.0, rank=2, retain=config.max_staleness + 1)
        self.retained = {0: self._copy()}
        self.trained: list[tuple[int, int, int]] = []
        """(step, group, version) of every group trained, in order."""

    def begin(self, step: int, plan: StepPlan) -> None:
        self.step, self.plan = step, plan
        self.gradient = torch.zeros(SIZE, 2)
        self.count = 0

    def accumulate(self, metas: list[GroupMeta], *trajectories: Trajectory) -> None:
        meta = metas[0]
        latents = torch.from_numpy(np.concatenate([t.latents for t in trajectories]))
        weights = torch.tensor(meta.advantages, dtype=torch.float32)[:, None]
        self.gradient += (weights * latents).T @ (latents @ self.tensors["layer.lora_A.weight"].T) / self.plan.rows
        self.trained.append((self.step, meta.group, meta.version))
        self.count += 1

    def finish(self) -> UpdateStats:
        if self.count:
            self.tensors["layer.lora_B.weight"] += 0.1 * self.gradient / (1e-6 + self.gradient.norm())
        self.retained[self.step + 1] = self._copy()
        for old in [v for v in self.retained if v < self.step + 1 - self.config.max_staleness]:
            del self.retained[old]
        return UpdateStats(self.step, self.plan.update, self.count == 0, {"loss": 0.0})

    def canary(self) -> dict[str, torch.Tensor]:
        tensors = canary_tensors(self.publisher.layout, 1)
        self.publisher.stage(CANARY_VERSION, tensors)
        return binding_probe(toy_lora(tensors))

    def stage(self, version: int, stream: str) -> None:
        self.publisher.stage(version, self.retained[version])

    def seal(self, version: int, stream: str) -> Header:
        return self.publisher.seal(version)

    def payload(self, version: int, stream: str) -> tuple[Header, Any]:
        return self.publisher.payload(version)

    def hold(self, version: int, stream: str) -> None:
        self.publisher.hold(version)

    def release(self, version: int, stream: str) -> None:
        self.publisher.release(version)

    def _copy(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.tensors.items()}

    def weights_digest(self) -> str:
        return weights_digest(self.tensors)


@dataclass
class Timing:
    """How long each method takes, in virtual seconds: constant, or drawn from (seed, worker, method, call number)."""

    seed: int = 0
    generate: float = 1.0
    score: float = 0.1
    update: float = 1.0
    transfer: float = 0.05
    spread: float = 0.0
    """Relative spread: each duration is multiplied by a draw from 1 - spread .. 1 + spread."""
    slow: Mapping[str, float] = field(default_factory=dict)
    """Factor per worker name."""

    def duration(self, worker: str, method: str, call: int) -> float:
        known = {"generate": self.generate, "score": self.score, "accumulate": self.update, "receive": self.transfer}
        draw = random.Random(f"{self.seed}/{worker}/{method}/{call}").uniform(1 - self.spread, 1 + self.spread)
        return known.get(method, 0.0) * draw * self.slow.get(worker, 1.0)


Fault = Callable[[str, str, int], str | None]
"""(worker, method, call number) → None, "kill" (before the result), "hang", "raise" or "lose"."""


class VirtualWorker:
    """Hosts one toy object; lanes are locks, time is virtual."""

    def __init__(self, pool: str, index: int, name: str, target: Any, timing: Timing, fault: Fault) -> None:
        self.pool, self.index, self.name, self.target = pool, index, name, target
        self.pid, self.node = 0, "virtual"
        self.timing, self.fault = timing, fault
        self.calls: dict[str, int] = {}
        self.dead = asyncio.Event()
        self.lanes: dict[str, asyncio.Lock] = {}

    async def call(self, method: str, *args: Any, lane: str = "main") -> Any:
        running = asyncio.create_task(self._run(method, args, lane))
        death = asyncio.create_task(self.dead.wait())
        try:
            await asyncio.wait([running, death], return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise WorkerDied(self.name, f"killed during {method}")
            return running.result()
        finally:
            running.cancel()
            death.cancel()

    async def call_split(
        self, method: str, *args: Any, returns: int, lane: str = "main"
    ) -> tuple[Any, tuple[Any, ...]]:
        result = await self.call(method, *args, lane=lane)
        assert len(result) == returns
        return result[0], tuple(result[1:])

    async def _run(self, method: str, args: tuple[Any, ...], lane: str) -> Any:
        if self.dead.is_set():
            raise WorkerDied(self.name, "dead already")
        async with self.lanes.setdefault(lane, asyncio.Lock()):
            number = self.calls[method] = self.calls.get(method, 0) + 1
            fault = self.fault(self.name, method, number)
            await asyncio.sleep(self.timing.duration(self.name, method, number))
            if fault == "kill":
                self.kill()
                await asyncio.Event().wait()
            if fault == "hang":
                await asyncio.Event().wait()
            if fault == "raise":
                raise WorkerFailed(self.name, method, "RuntimeError", "injected", "")
            return getattr(self.target, method)(*args)

    def kill(self) -> None:
        self.dead.set()


class VirtualGroup:
    def __init__(self, spec: PoolSpec, factory: Callable[..., Any], timing: Timing, fault: Fault) -> None:
        self.spec, self.factory, self.timing, self.fault = spec, factory, timing, fault
        self.generation = [0] * spec.num_workers
        self.workers: list[Any] = [self._build(index) for index in range(spec.num_workers)]
        self.replaced = 0

    def _build(self, index: int) -> VirtualWorker:
        suffix = f".{self.generation[index]}" if self.generation[index] else ""
        name = f"{self.spec.name}-{index}{suffix}"
        target = self.factory(index=index, name=name, **self.spec.arguments)
        return VirtualWorker(self.spec.name, index, name, target, self.timing, self.fault)

    async def replace(self, index: int) -> VirtualWorker:
        self.workers[index].kill()
        await asyncio.sleep(2.0)
        self.generation[index] += 1
        self.replaced += 1
        self.workers[index] = self._build(index)
        return self.workers[index]  # type: ignore[no-any-return]

    async def fetch(self, ref: Any) -> Any:
        return ref

    async def close(self) -> None:
        for worker in self.workers:
            worker.kill()


@dataclass
class ListObserver:
    """Keeps every event with its virtual time."""

    events: list[dict[str, Any]] = field(default_factory=list)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def event(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, "time": self.now(), **fields})

    def state(self, worker: str, state: str) -> None:
        self.event("state", worker=worker, state=state)

    def of(self, event: str, **match: Any) -> list[dict[str, Any]]:
        return [e for e in self.events if e["event"] == event and all(e.get(k) == v for k, v in match.items())]


class ToySteps:
    """Records every step's metrics; starts evaluations as the real bookkeeping does."""

    def __init__(self, observer: ListObserver) -> None:
        self.observer = observer
        self.lines: list[dict[str, float]] = []
        self.evaluated: list[EvaluationResult] = []
        self.evaluations = Evaluations(self.evaluated.append)

    async def before_training(self, ctx: Context) -> None:
        if ctx.config.evaluate.before_training:
            await self.evaluations.start(ctx, 0)
        self.began = self.observer.now()

    async def after_step(self, ctx: Context, step: int, stats: dict[str, float]) -> None:
        began, self.began = self.began, self.observer.now()
        self.observer.event("step", step=step, started=began, ended=self.began)
        self.lines.append(stats)
        self.evaluations.check()
        every = ctx.config.evaluate.every
        if every and (step + 1) % every == 0:
            await self.evaluations.start(ctx, step + 1)

    async def drain(self, ctx: Context) -> None:
        await self.evaluations.drain()


@dataclass
class ToyRun:
    """What a finished (or failed) toy run can be asked."""

    digest: str
    observer: ListObserver
    lines: list[dict[str, float]]
    trained: list[tuple[int, int, int]]
    table: TicketTable
    evaluated: list[EvaluationResult]
    rollout: VirtualGroup
    seconds: float

    def staleness(self) -> list[float]:
        return [line["staleness/max"] for line in self.lines]


def toy_config(k: int = 1, *, hand_over: str = "batch", steps: int = 6, **changes: Any) -> Config:
    config = Config(total_steps=steps, prompts_per_step=4, group_size=4, max_staleness=k, hand_over=hand_over, seed=0)
    config.reward = RewardConfig(terms={"color": RewardTerm()}, backoff=0.1)
    config.evaluate = EvaluateConfig(before_training=False, images_per_prompt=2)
    config.rollout.num_workers = 2
    config.deadlines = DeadlinesConfig(load=60, generate=30, score=30, publish=30, update=60, close=5)
    for key, value in changes.items():
        *parents, last = key.split("__")
        target: Any = config
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, last, value)
    return config


def no_fault(worker: str, method: str, number: int) -> str | None:
    return None


async def toy_run(config: Config, timing: Timing | None = None, fault: Fault = no_fault) -> ToyRun:
    """Builds the context as build.py does, with virtual groups, and runs the real loop."""
    timing = timing or Timing()
    observer = ListObserver()
    groups = {
        name: VirtualGroup(PoolSpec(name, "", count, arguments={"config": config}), factory, timing, fault)
        for name, count, factory in (
            ("trainer", 1, ToyTrainer),
            ("rollout", config.rollout.num_workers, ToyRollout),
            ("reward", config.reward.num_workers, ToyReward),
        )
    }
    algorithm = build_algorithm(
        config.algorithm, max_staleness=config.max_staleness, updates_per_batch=1, hand_over=config.hand_over,
        num_inference_steps=2,
    )  # fmt: skip
    prompts = [Prompt(index, f"prompt {index}") for index in range(5)]
    table = TicketTable(
        shape(config),
        on_change=lambda t: observer.event(
            "ticket", ordinal=t.ordinal, kind=t.kind, step=t.step, state=t.state, worker=t.worker, attempt=t.attempt,
            version=t.version,
        ),
    )  # fmt: skip
    gang = TrainerGang(groups["trainer"], algorithm)
    weights = PublishedWeights(gang)
    steps = ToySteps(observer)
    ctx = Context(
        config=config, recipe=Recipe(config, prompts, prompts[:2]), table=table, rollout=groups["rollout"],
        reward=groups["reward"], trainer=gang, weights=weights, observer=observer, steps=steps,
    )  # fmt: skip
    weights.ctx = ctx
    for worker in groups["rollout"].workers:
        table.join(worker.name)
    await run(ctx)
    trainer = groups["trainer"].workers[0].target
    seconds = asyncio.get_running_loop().time()
    return ToyRun(
        trainer.weights_digest(),
        observer,
        steps.lines,
        trainer.trained,
        table,
        steps.evaluated,
        groups["rollout"],
        seconds,
    )


def virtual(config: Config, timing: Timing | None = None, fault: Fault = no_fault, *, horizon: float = 1e5) -> ToyRun:
    """A toy run in virtual time. Whatever ends it is raised; a hang is Deadlock or HorizonReached."""
    return run_virtual(toy_run(config, timing, fault), horizon=horizon)
