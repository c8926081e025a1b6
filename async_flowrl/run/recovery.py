"""Recovery: the death of a trainer rank ends an attempt, and the next attempt begins at the last checkpoint.

This is the same path that `resume` takes after the controller itself has died: the ticket table is built anew, the
versions that its tickets name are published again, and what had been generated since is generated again, identically.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

from async_flowrl.config import exit_codes
from async_flowrl.controller.after_step import AfterStep
from async_flowrl.controller.build import ROLLOUT, TRAINER, build_context
from async_flowrl.controller.checkpoints import Checkpoints, Resume, newest, with_outcomes
from async_flowrl.controller.context import Context
from async_flowrl.controller.dispatch import StartError
from async_flowrl.controller.download import download_model, loaders
from async_flowrl.controller.evaluation_records import EvaluationRecords
from async_flowrl.controller.living import dead_among
from async_flowrl.controller.reward_servers import RewardServers
from async_flowrl.controller.score_log import ScoreLog
from async_flowrl.controller.trainer import TrainerGroup
from async_flowrl.loop import run as run_loop
from async_flowrl.observability.evaluations import EvaluationLog
from async_flowrl.observability.events import EventLog
from async_flowrl.observability.ledger import PoolLedger
from async_flowrl.observability.metrics import MetricsLog
from async_flowrl.observability.monitor import Monitor
from async_flowrl.observability.run_directory import RunDirectory
from async_flowrl.rewards.registry import keeps_scores
from async_flowrl.run.launch import Negatives, load_trainer, send_negatives
from async_flowrl.run.prepare import Prepared
from async_flowrl.run.stopping import StopRequest
from async_flowrl.training.checkpoint import drop_newer
from separation.group import Worker, WorkerDied, WorkerFailed, WorkerGroup
from separation.supervise import DeadlineExceeded, deadline

logger = logging.getLogger(__name__)

MAX_RECOVERIES = 3
"""Deaths of trainer ranks that a run survives; one more ends it with that death's name."""


@dataclass(frozen=True)
class Ledgers:
    """Where a run is written down while it goes on."""

    events: EventLog
    pools: PoolLedger
    metrics: MetricsLog
    evaluations: EvaluationLog
    monitor: Monitor
    failures: list[str] = field(default_factory=list)
    """What went wrong beside the training, a sentence each: an evaluation, a picture."""


@dataclass(frozen=True)
class Run:
    """Everything that outlives an attempt."""

    prepared: Prepared
    directory: RunDirectory
    groups: Mapping[str, WorkerGroup]
    trainers: TrainerGroup
    ledgers: Ledgers
    stop: StopRequest
    base_digest: str
    device: str
    """Device of the trainer ranks, as they report it: `cpu`, `cuda:0`."""
    transport: str
    negatives: Negatives
    servers: RewardServers = field(default_factory=RewardServers)


async def train_with_recovery(run: Run, resume: Resume) -> Context:
    """Trains to the end (or until asked to stop), through at most MAX_RECOVERIES deaths of trainer ranks.

    A trainer that dies after the run was asked to stop ends it: whoever asked may be ending everything.
    """
    for left in reversed(range(MAX_RECOVERIES + 1)):
        try:
            if left < MAX_RECOVERIES:
                resume = await recover(run, resume)
            return await attempt(run, resume)
        except (WorkerDied, WorkerFailed) as error:
            dead = await dead_ranks(run.trainers)
            if not dead or left == 0 or run.stop():
                raise
            logger.warning("%s died; going on from the last checkpoint", ", ".join(dead))
            run.ledgers.events.event("fault", worker=dead[0], kind=type(error).__name__, message=str(error))
    raise AssertionError("unreachable")


async def attempt(run: Run, resume: Resume) -> Context:
    """From a checkpoint to the end, or to the first failure, which is raised.

    After the last checkpoint only evaluations are outstanding. What fails then (the images of one cannot be made, for
    example) is written down, and the run has its results all the same, as long as the trainer is there to give them.
    """
    ctx = context_of(run, resume)
    try:
        await run_loop(ctx)
    except Exception as error:  # whatever it was
        if not ctx.steps.trained or await dead_ranks(run.trainers):
            raise
        logger.exception("training is done, but an evaluation could not be completed")
        run.ledgers.failures.append(f"evaluations at the end: {type(error).__name__}: {error}")
    finally:
        await run.trainers.living.settle()
        await ctx.weights.close()
        ctx.steps.abandon()
    return ctx


async def dead_ranks(trainers: TrainerGroup) -> list[str]:
    """Names of the trainer ranks that are gone, as far as it shows by now."""
    return [worker.name for worker in await dead_among(trainers.workers.workers)]


async def recover(run: Run, before: Resume) -> Resume:
    """New trainer ranks from the newest checkpoint; rollout workers keep their base model and forget every version.

    `before` is where the attempt that has ended began: a run without a checkpoint of its own begins there again.
    """
    config, trainer = run.prepared.config, run.groups[TRAINER]
    for index in range(len(trainer.workers)):
        await trainer.replace(index)
    ranks = loaders(trainers=trainer.workers)
    await download_model(run.prepared.model, ranks, seconds=config.deadlines.download)
    info = await load_trainer(config, trainer, run.trainers)
    if info["base_digest"] != run.base_digest:
        raise StartError(f"the new trainer's base weights are {info['base_digest']}, were {run.base_digest}")
    async with asyncio.TaskGroup() as tasks:
        for worker in run.groups[ROLLOUT].workers:
            tasks.create_task(clean_rollout(worker, seconds=config.deadlines.generate))
    own = newest(run.directory)
    resume = before if own.path is None else own
    async with deadline(config.deadlines.load, "load: the trainer's return to the last checkpoint"):
        await send_negatives(run.trainers, run.negatives)
        await restore(run.trainers, run.directory, resume)
    run.ledgers.metrics.truncate(resume.version)
    run.ledgers.evaluations.truncate(resume.version)
    run.ledgers.events.event("rollback", step=resume.version)
    return resume


async def restore(trainers: TrainerGroup, directory: RunDirectory, resume: Resume) -> None:
    """Every trainer rank goes on from the checkpoint; later ones, damaged or left behind on purpose, are removed."""
    if resume.path is not None:
        await trainers.all("restore", str(resume.path))
        drop_newer(directory.checkpoints, resume.version)


async def clean_rollout(worker: Worker, *, seconds: float) -> None:
    """Waits for what the worker was doing, then makes it forget its versions.

    A worker that cannot, because it is dead, hangs, or was just being replaced and holds no model yet, is killed: the
    next attempt finds it dead and replaces it.
    """
    try:
        async with deadline(seconds, f"generate: what {worker.name} was doing when a trainer rank died"):
            for lane in ("main", "sync"):
                await worker.call("receiver.clear", lane=lane)
    except (WorkerDied, WorkerFailed, DeadlineExceeded) as error:
        logger.info("%s takes no part in the next attempt: %s", worker.name, error)
        worker.kill()


def records_of(run: Run) -> EvaluationRecords:
    """What takes note of evaluations; what earlier attempts and runs recorded in the directory counts."""
    ledgers = run.ledgers
    return EvaluationRecords(
        run.prepared.config,
        run.directory,
        ledgers.metrics,
        ledgers.monitor,
        ledgers.evaluations,
        ledgers.events,
        ledgers.failures,
        lambda reason: run.stop.ask(reason, exit_codes.HACKING),
    )


def context_of(run: Run, resume: Resume) -> Context:
    """Fresh controller state for an attempt that goes on from `resume`; the event log learns who the workers are."""
    config, ledgers = run.prepared.config, run.ledgers
    own = resume.path is not None and resume.path.parent.resolve() == run.directory.checkpoints.resolve()
    requests = with_outcomes(run.prepared.requests, resume)
    saved = [resume.version] if own else []
    records = records_of(run)
    checkpoints = Checkpoints(
        config,
        run.directory,
        run.trainers,
        run.device,
        requests=requests,
        base_digest=run.base_digest,
        saved=saved,
        spare=records.spare,
    )
    first_step = resume.version
    score_log = ScoreLog(run.directory.scores, first_step=first_step) if keeps_scores(config.reward) else None
    ctx = build_context(
        requests,
        run.groups,
        run.trainers,
        ledgers.events,
        AfterStep(
            ledgers.metrics,
            ledgers.monitor,
            checkpoints,
            ledgers.pools,
            records,
            latent_elements=prod(run.prepared.shapes.latents),
        ),
        base_digest=run.base_digest,
        transport=run.transport,
        first_step=first_step,
    )
    for worker in [worker for group in run.groups.values() for worker in group.workers]:
        ledgers.events.event("worker", worker=worker.name, pid=worker.pid, node=worker.node)
    return replace(ctx, score_log=score_log, stop_requested=run.stop, servers=run.servers)
