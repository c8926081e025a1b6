"""Toy runs: the real controller with toy workers in virtual time, for tests; `virtual` runs one.

Tickets, gate, loop, delivery and receivers are the real ones. The network is replaced by a policy of a few numbers, and
computing by sleeping. In virtual time the event loop's clock jumps to the next event. The weights depend on every
image, its noise, its version and the order of training, so equal digests mean equal runs.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from async_flowrl.algorithms.registry import build_algorithm
from async_flowrl.config.schema import FULL, Config, DeadlinesConfig, EvaluateConfig, RewardConfig, RewardTerm
from async_flowrl.config.scoring_pools import scoring_pools
from async_flowrl.controller.context import Context
from async_flowrl.controller.evaluation import EvaluationResult, Evaluations
from async_flowrl.controller.trainer import TrainerGroup
from async_flowrl.run.loop import run
from async_flowrl.run.recovery import build_context
from async_flowrl.tickets.request import RequestBuilder
from async_flowrl.tickets.table import TicketTable
from async_flowrl.types import Prompt
from checkpoint_engine.transports import OBJECT_STORE
from tests.support.toy_growth import ToyGrowth
from tests.support.toy_pool import Fault, ListObserver, Timing, ToyPool, World, no_fault
from tests.support.toy_reward import ToyReward
from tests.support.toy_rollout import ToyRollout
from tests.support.toy_trainer import ToyTrainer
from tests.support.virtual import run_virtual

TEXTS = tuple(f"prompt {index}" for index in range(5))
"""Training prompts of a toy run, all of one length."""
_calm_runs: dict[str, "ToyRun"] = {}
"""Results of `calm_run` by its arguments."""


class ToySteps:
    """Stands in for AfterStep (controller/after_step.py): records every step's metrics and starts evaluations."""

    trained = False

    def __init__(self, observer: ListObserver) -> None:
        self.observer = observer
        self.lines: list[dict[str, float]] = []
        self.evaluated: list[EvaluationResult] = []
        self.failures: list[str] = []
        self.evaluations = Evaluations(self.evaluated.append, lambda what, why: self.failures.append(f"{what}: {why}"))

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

    def abandon(self) -> None:
        self.evaluations.cancel()


@dataclass
class ToyRun:
    """The results of a toy run."""

    digest: str
    """Digest of the final weights."""
    observer: ListObserver
    lines: list[dict[str, float]]
    """Metrics of each step."""
    trained: list[tuple[int, int, int]]
    """(step, group, version) of every trained group, in order."""
    table: TicketTable
    evaluated: list[EvaluationResult]
    groups: Mapping[str, ToyPool]
    seconds: float
    """Virtual seconds that the run took."""
    sync: Mapping[str, Any]
    """The `sync` section of summary.json."""

    def staleness(self) -> list[float]:
        return [line["staleness/max"] for line in self.lines]

    def tickets(self, state: str, kind: str = "train") -> list[dict[str, Any]]:
        """Returns the events of tickets that came into `state`, in order."""
        return self.observer.of("ticket", state=state, kind=kind)

    def published(self) -> dict[int, str]:
        """Returns version → digest, for every version that was sent."""
        return {event["version"]: event["digest"] for event in self.observer.of("version", state="sent")}


def toy_config(k: int = 1, *, hand_over: str = "batch", steps: int = 6, **changes: Any) -> Config:
    """Returns a configuration for toy runs with `max_staleness` k.

    `changes` sets other fields; a double underscore stands for a dot, e.g. `rollout__num_workers=3`.
    """
    config = Config(total_steps=steps, prompts_per_step=4, group_size=4, max_staleness=k, hand_over=hand_over, seed=0)
    config.reward = RewardConfig(terms={"color": RewardTerm()}, backoff=0.1)
    config.evaluate = EvaluateConfig(before_training=False, images_per_prompt=2)
    config.rollout.num_workers = 2
    config.deadlines = DeadlinesConfig(load=60, generate=30, score=30, publish=30, update=60, stall=20)
    for key, value in changes.items():
        *parents, last = key.split("__")
        target: Any = config
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, last, value)
    return config


Disturbance = Callable[[Context, Mapping[str, ToyPool]], Awaitable[None]]
"""A coroutine function that runs beside the loop and may disturb the pools (by name), e.g. kill a worker."""


async def toy_run(
    config: Config,
    timing: Timing | None = None,
    fault: Fault = no_fault,
    *,
    disturb: Disturbance | None = None,
    observer: ListObserver | None = None,
    texts: Sequence[str] = TEXTS,
) -> ToyRun:
    """Builds the pools and the context of a toy run, runs the real loop, and returns the results.

    `timing` says how long calls take, `fault` which calls fail, and `disturb` runs beside the loop. `texts` are the
    training prompts.
    """
    observer = observer or ListObserver()
    groups = toy_groups(config, World(timing or Timing(), fault, observer))
    for worker in groups["rollout"].workers:
        worker.target.load()
    return await trained_on(config, groups, observer, disturb, texts=texts)


async def trained_on(
    config: Config,
    groups: Mapping[str, Any],
    observer: ListObserver,
    disturb: Disturbance | None = None,
    *,
    hosted: Callable[[Any], ToyTrainer] = lambda worker: worker.target,
    texts: Sequence[str] = TEXTS,
) -> ToyRun:
    """Runs the real loop on pools of toy workers, whose models are loaded, and returns the results.

    `hosted` returns the toy trainer of a worker of the trainer's pool.
    """
    steps = ToySteps(observer)
    ctx, trainers = toy_context(config, groups, observer, texts)
    beside = asyncio.ensure_future(disturb(ctx, groups)) if disturb else None
    try:
        await run(ctx, trainers, cast("Any", steps))
    finally:
        if beside is not None:
            beside.cancel()
        steps.abandon()
        await ctx.weights.close()
    trainer = hosted(trainers.first)
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


def toy_groups(config: Config, world: World) -> dict[str, ToyPool]:
    pools: tuple[tuple[str, int, Any], ...] = (
        ("trainer", config.trainer.num_workers, _trainer_of(config)),
        ("rollout", config.rollout.num_workers, ToyRollout),
        *((pool.name, pool.workers, ToyReward) for pool in scoring_pools(config)),
    )
    made = {name: ToyPool(name, size, partial(factory, config), world) for name, size, factory in pools}
    for worker in made["trainer"].workers:
        worker.target.ranks = lambda: [other.target for other in made["trainer"].workers]
    if config.rollout.elastic:
        made["rollout"].growth = ToyGrowth(made["rollout"], config.rollout)
    return made


def _trainer_of(config: Config) -> type[ToyTrainer]:
    """Returns the class of the trainer ranks. The one of ranks in shares loads torch.distributed.checkpoint."""
    trainer = config.trainer
    if config.tune != FULL or trainer.shard != "full" or trainer.num_workers == 1:
        return ToyTrainer
    from tests.support.toy_shares import ToyShareTrainer

    return ToyShareTrainer


def toy_context(
    config: Config, groups: Mapping[str, ToyPool], observer: ListObserver, texts: Sequence[str] = TEXTS
) -> tuple[Context, TrainerGroup]:
    algorithm = build_algorithm(config)
    prompts = [Prompt(index, text) for index, text in enumerate(texts)]
    requests, trainers = RequestBuilder(config, prompts, prompts[:2]), TrainerGroup(groups["trainer"], algorithm)
    return build_context(requests, groups, trainers, observer, OBJECT_STORE, base_digest="toy"), trainers


def virtual(
    config: Config, timing: Timing | None = None, fault: Fault = no_fault, *, horizon: float = 1e5, **more: Any
) -> ToyRun:
    """Runs a toy run in virtual time and returns its results; the arguments are those of `toy_run`.

    Raises the error that ends the run. Raises Deadlock if nothing can happen any more, and HorizonReached after
    `horizon` virtual seconds.
    """
    return run_virtual(toy_run(config, timing, fault, **more), horizon=horizon)


def calm_run(config: Config, timing: Timing | None = None) -> ToyRun:
    """Returns the results of a toy run without faults, which is made once for equal arguments.

    Tests compare other runs with it and change nothing of it. A test that patches what a run consists of calls
    `virtual`; planted faults (tests/mutants) forget the runs that were made without them.
    """
    arguments = f"{config!r} {timing or Timing()!r}"
    if arguments not in _calm_runs:
        _calm_runs[arguments] = virtual(config, timing)
    return _calm_runs[arguments]


def forget_calm_runs() -> None:
    _calm_runs.clear()
