"""Real worker processes whose engines sleep for random durations of given laws; all else is as in a run."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from async_flowrl.algorithms.registry import build_algorithm
from async_flowrl.config.reward_pools import reward_pools
from async_flowrl.config.schema import Config
from async_flowrl.controller.build import build_context
from async_flowrl.controller.context import Context
from async_flowrl.controller.trainer import TrainerGroup
from async_flowrl.loop import run
from async_flowrl.observability.events import EventLog
from async_flowrl.observability.ledger import PoolLedger
from async_flowrl.observability.metrics import MetricsLog
from async_flowrl.plan.laws import Law
from async_flowrl.tickets.request import RequestBuilder
from async_flowrl.types import Prompt, RolloutRequest, Scores
from separation.cluster import cluster
from separation.group import PoolSpec
from tests.support.toy import ToyReward, ToyRollout, ToyTrainer, toy_config

TICKET, GROUP, SCORE = Law(0.24, 0.3), Law(0.24, 0.1), Law(0.05, 0.5)
"""One ticket on one rollout worker, one group on a single trainer rank, one group on a reward worker; seconds."""
STEPS, PROMPTS = 9, 8


class SleepingRollout(ToyRollout):
    def generate(self, request: RolloutRequest) -> Any:
        time.sleep(TICKET.draw(f"generate/{request.ordinal}"))
        return super().generate(request)


class SleepingReward(ToyReward):
    calls = 0

    def score(self, prompt: Prompt, *images: Any) -> Scores:
        self.calls += 1
        time.sleep(SCORE.draw(f"score/{self.name}/{self.calls}"))
        return super().score(prompt, *images)


class SleepingTrainer(ToyTrainer):
    """Of several ranks each has what it trained alone: only the times matter here."""

    def accumulate(self, metas: Any, *trajectories: Any, **tickets: Any) -> None:
        for meta in metas:
            time.sleep(GROUP.draw(f"update/{self.step}/{meta.group}"))
        super().accumulate(metas, *trajectories, **tickets)

    def finish(self, request: Any = None) -> Any:
        return super().finish()


class MetricsOnly:
    """AfterStep that keeps what a plan reads."""

    trained = False

    def __init__(self, log: MetricsLog) -> None:
        self.log = log

    async def before_training(self, ctx: Context) -> None:
        self.began = ctx.observer.now()

    async def after_step(self, ctx: Context, step: int, stats: dict[str, float]) -> None:
        began, self.began = self.began, ctx.observer.now()
        ctx.observer.event("step", step=step, started=began, ended=self.began)
        self.log.append(step, stats | {"timing/step": self.began - began})

    async def amend(self, ctx: Context, step: int, metrics: Mapping[str, float]) -> None:
        self.log.amend(step, metrics)

    async def drain(self, ctx: Context) -> None:
        pass

    def abandon(self) -> None:
        pass


def sleep_config(k: int, hand_over: str, rollout: int, trainer: int) -> Config:
    return toy_config(
        k, hand_over=hand_over, steps=STEPS, prompts_per_step=PROMPTS, rollout__num_workers=rollout,
        trainer__num_workers=trainer, reward__num_workers=2,
    )  # fmt: skip


def sleeping_run(directory: Path, config: Config) -> Path:
    """Runs the real loop on Ray actors; returns the run directory (config, events, metrics)."""
    directory.mkdir()
    (directory / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(asdict(config))))
    asyncio.run(_run(directory, config))
    return directory


async def _run(directory: Path, config: Config) -> None:
    pools = [
        PoolSpec(pool, f"tests.integration.sleeping:{factory}", count, arguments={"config": config}, lanes=lanes)
        for pool, factory, count, lanes in (
            ("trainer", "SleepingTrainer", config.trainer.num_workers, ("publish",)),
            ("rollout", "SleepingRollout", config.rollout.num_workers, ("sync",)),
            *((pool.name, "SleepingReward", pool.workers, ()) for pool in reward_pools(config.reward)),
        )
    ]
    algorithm = build_algorithm(config)
    prompts = [Prompt(index, f"prompt {index}") for index in range(5)]
    offset = time.time() - time.monotonic()
    async with cluster(pools, start_deadline=300.0) as groups:
        clock = time.monotonic
        log = EventLog(directory / "events.jsonl", lambda: clock() + offset, ledger=PoolLedger(clock))
        with log:
            trainers = TrainerGroup(groups["trainer"], algorithm)
            requests = RequestBuilder(config, prompts, prompts[:2])
            steps = MetricsOnly(MetricsLog(directory / "metrics.jsonl"))
            await run(build_context(requests, groups, trainers, log, steps, base_digest="toy"))
