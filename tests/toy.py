"""The real controller on toy workers in virtual time: real tickets, gate, loop, delivery and receivers; a policy of a few
numbers in place of the network, and sleeps in place of compute. The weights depend on every image, its noise, its version
and the order of training, so that equal digests mean equal runs."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from async_flowrl.algorithms.registry import build_algorithm
from async_flowrl.config import Config, DeadlinesConfig, EvaluateConfig, RewardConfig, RewardTerm
from async_flowrl.context import Context
from async_flowrl.evaluation import EvaluationResult, Evaluations
from async_flowrl.loop import run
from async_flowrl.recipe import Recipe, shape
from async_flowrl.rewards.composite import checked
from async_flowrl.seeds import generator
from async_flowrl.tickets import Ticket, TicketTable
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
from separation.group import PoolSpec
from tests.toy_pool import Fault, ListObserver, Timing, VirtualGroup, World, no_fault
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
        self.spoil: str | None = None
        """"nan" or "count": what is wrong with the next result."""

    def score(self, prompt: Prompt, *images: Any) -> Scores:
        values = [float(x.mean()) for image in images for x in image]
        result = {"nan": [*values[:-1], float("nan")], "count": values[:-1]}.get(self.spoil or "", values)
        self.spoil = None
        total = checked("color", prompt, result, len(values))
        return Scores(total, {"color": total})


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
    groups: Mapping[str, VirtualGroup]
    seconds: float
    sync: Mapping[str, Any]

    def staleness(self) -> list[float]:
        return [line["staleness/max"] for line in self.lines]

    def tickets(self, state: str, kind: str = "train") -> list[dict[str, Any]]:
        """The transitions into `state`, in the order they happened."""
        return self.observer.of("ticket", state=state, kind=kind)

    def published(self) -> dict[int, str]:
        """Digest of every version that was sent."""
        return {event["version"]: event["digest"] for event in self.observer.of("version", state="sent")}


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


Disturbance = Callable[[Context, Mapping[str, VirtualGroup]], Awaitable[None]]
"""Runs beside the loop and may do to the pools whatever it likes."""


async def toy_run(
    config: Config,
    timing: Timing | None = None,
    fault: Fault = no_fault,
    *,
    disturb: Disturbance | None = None,
    observer: ListObserver | None = None,
) -> ToyRun:
    """Builds the context as build.py does, with virtual groups, and runs the real loop."""
    observer = observer or ListObserver()
    groups = toy_groups(config, World(timing or Timing(), fault, observer))
    steps = ToySteps(observer)
    ctx = toy_context(config, groups, observer, steps)
    beside = asyncio.ensure_future(disturb(ctx, groups)) if disturb else None
    await run(ctx)
    if beside is not None:
        beside.cancel()
    trainer = groups["trainer"].workers[0].target
    return ToyRun(
        digest=trainer.weights_digest(),
        observer=observer,
        lines=steps.lines,
        trained=trainer.trained,
        table=ctx.table,
        evaluated=steps.evaluated,
        groups=groups,
        seconds=asyncio.get_running_loop().time(),
        sync=ctx.weights.report(),
    )


def toy_groups(config: Config, world: World) -> dict[str, VirtualGroup]:
    pools: tuple[tuple[str, int, Any], ...] = (
        ("trainer", config.trainer.num_workers, ToyTrainer),
        ("rollout", config.rollout.num_workers, ToyRollout),
        ("reward", config.reward.num_workers, ToyReward),
    )
    return {
        name: VirtualGroup(PoolSpec(name, "", count, arguments={"config": config}), factory, world)
        for name, count, factory in pools
    }


def toy_context(config: Config, groups: Mapping[str, VirtualGroup], observer: ListObserver, steps: ToySteps) -> Context:
    algorithm = build_algorithm(
        config.algorithm,
        max_staleness=config.max_staleness,
        updates_per_batch=1,
        hand_over=config.hand_over,
        num_inference_steps=2,
    )
    prompts = [Prompt(index, f"prompt {index}") for index in range(5)]
    table = TicketTable(shape(config), on_change=lambda ticket: note(observer, ticket))
    gang = TrainerGang(groups["trainer"], algorithm)
    weights = PublishedWeights(gang)
    ctx = Context(
        config=config,
        recipe=Recipe(config, prompts, prompts[:2]),
        table=table,
        rollout=groups["rollout"],
        reward=groups["reward"],
        trainer=gang,
        weights=weights,
        observer=observer,
        steps=steps,
        base_digest="toy",
    )
    weights.ctx = ctx
    for worker in groups["rollout"].workers:
        table.join(worker.name)
    return ctx


def note(observer: ListObserver, ticket: Ticket) -> None:
    observer.event(
        "ticket",
        ordinal=ticket.ordinal,
        kind=ticket.kind,
        step=ticket.step,
        group=ticket.group,
        state=ticket.state,
        worker=ticket.worker,
        attempt=ticket.attempt,
        version=ticket.version,
        digest=ticket.digest,
    )


def virtual(
    config: Config, timing: Timing | None = None, fault: Fault = no_fault, *, horizon: float = 1e5, **more: Any
) -> ToyRun:
    """A toy run in virtual time. Whatever ends it is raised; a hang is Deadlock or HorizonReached."""
    return run_virtual(toy_run(config, timing, fault, **more), horizon=horizon)
