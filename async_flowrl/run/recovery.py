"""Recovery from a trainer rank's death: the attempt ends, and the next one begins at the last kept state.

All trainer ranks are started again with the state that the controller has kept (controller/kept_state.py), or with
whole weights the last checkpoint. As after `resume`, the ticket table is built anew, the versions that its tickets name
are published again, and all images made since the state are generated again, identically.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from async_flowrl.algorithms.registry import resolve_correction
from async_flowrl.config import exit_codes
from async_flowrl.config.curves import checkpoint_due
from async_flowrl.config.schema import Config
from async_flowrl.config.scoring_pools import ROLLOUT, TRAINER, scoring_pools
from async_flowrl.controller.admission import check_base, download_model, load_rollout, loaders
from async_flowrl.controller.after_step import AfterStep
from async_flowrl.controller.checkpoints import Checkpoints
from async_flowrl.controller.context import Context
from async_flowrl.controller.evaluation import EvaluationRecords
from async_flowrl.controller.kept_state import KeptState, KeptStates
from async_flowrl.controller.resume import START, Resume, newest, with_outcomes
from async_flowrl.controller.reward_servers import RewardServers
from async_flowrl.controller.score_log import ScoreLog
from async_flowrl.controller.trainer import TrainerGroup
from async_flowrl.controller.weights import PublishedWeights
from async_flowrl.observability.evaluations import EvaluationLog
from async_flowrl.observability.events import EventLog
from async_flowrl.observability.ledger import PoolLedger
from async_flowrl.observability.metrics import MetricsLog
from async_flowrl.observability.monitor import Monitor
from async_flowrl.observability.run_directory import RunDirectory
from async_flowrl.rewards.registry import keeps_scores
from async_flowrl.run.launch import Negatives, load_trainer, send_negatives
from async_flowrl.run.loop import run as run_loop
from async_flowrl.run.pools import controller_placement
from async_flowrl.run.prepare import Prepared
from async_flowrl.run.stopping import StopRequest
from async_flowrl.tickets.arithmetic import shape
from async_flowrl.tickets.request import RequestBuilder
from async_flowrl.tickets.table import TicketTable
from async_flowrl.training.checkpoint import (
    DamagedCheckpoint,
    PackedState,
    checkpoint_step,
    drop_newer,
    written,
)
from async_flowrl.types import EMA, POLICY
from separation.cohosted import SubGroup
from separation.group import Ref, RefLost, Worker, WorkerDied, WorkerFailed, WorkerGroup
from separation.supervise import DeadlineExceeded, Signal, deadline, together

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ledgers:
    events: EventLog
    pools: PoolLedger  # Seconds that each worker has spent in each state.
    metrics: MetricsLog
    evaluations: EvaluationLog
    monitor: Monitor
    # Sentences on failures outside the training, such as an evaluation or a picture that could not be made.
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    prepared: Prepared
    directory: RunDirectory
    groups: Mapping[str, WorkerGroup]
    trainers: TrainerGroup
    ledgers: Ledgers
    stop: StopRequest
    base_digest: str  # Checksum of the base weights; a new trainer rank must report the same.
    schedules: str  # Digest of the noise levels of all image sizes.
    device: str  # Device of the trainer ranks as torch names it, e.g. `cpu` or `cuda:0`.
    transport: str  # Way by which versions are sent to the rollout workers.
    negatives: Negatives  # Embeddings of the negative prompts, for the trainer ranks.
    peak_flops: float | None = None  # Peak FLOP/s of a trainer rank's device; None if unknown.
    servers: RewardServers = field(default_factory=RewardServers)
    kept: KeptStates = field(default_factory=KeptStates)


async def train_with_recovery(run: Run, resume: Resume) -> Context:
    """Trains to the end, or until the run is asked to stop, and recovers from the deaths of trainer ranks.

    Raises WorkerDied or WorkerFailed after `limits.recoveries` recoveries in a row without a new step, for a failure
    without a dead rank, and for any death after the run was asked to stop.
    """
    # The request to stop may come with the end of the whole machine.
    left, furthest = run.prepared.config.limits.recoveries, resume.version
    dead: list[str] = []
    while True:
        ctx: Context | None = None
        try:
            if dead:
                resume = await recover(run, resume)
            requests = with_outcomes(run.prepared.requests, resume)
            steps = steps_of(run, requests, resume)
            ctx = context_of(run, requests, resume)
            await attempt(run, ctx, steps)
        except (WorkerDied, WorkerFailed) as error:
            dead = await dead_ranks(run.trainers)
            if ctx is not None and ctx.table.step > furthest:
                left, furthest = run.prepared.config.limits.recoveries, ctx.table.step
            if not dead or left == 0 or run.stop():
                raise
            left -= 1
            logger.warning("%s died; all trainer ranks are started again", ", ".join(dead))
            # A SenderLost is recorded as WorkerDied, as every death: who noticed it does not matter here.
            kind = WorkerDied if isinstance(error, WorkerDied) else WorkerFailed
            run.ledgers.events.event("fault", worker=dead[0], kind=kind.__name__, message=str(error))
        else:
            return ctx


async def attempt(run: Run, ctx: Context, steps: AfterStep) -> None:
    # When the last step is trained, only evaluations are outstanding. A failure after that (such as images that cannot
    # be made) is added to the ledger's failures and not raised, unless a trainer rank has died.
    try:
        await run_loop(ctx, run.trainers, steps)
    except asyncio.CancelledError:
        run.kept.cancel()
        raise
    except Exception as error:  # any failure of an evaluation
        if not steps.trained or await dead_ranks(run.trainers):
            raise
        logger.exception("training is done, but an evaluation could not be completed")
        run.ledgers.failures.append(f"evaluations at the end: {type(error).__name__}: {error}")
    finally:
        await ctx.weights.close()
        steps.abandon()
        await run.kept.settle(ctx)


# Time within which the death of one rank must show after another rank has failed because of it.
DEATH_DETECTION_SECONDS = 2.0


async def dead_ranks(trainers: TrainerGroup) -> list[str]:
    """Returns the ranks whose death shows within DEATH_DETECTION_SECONDS, by name; returns as soon as one has."""
    watches = {asyncio.create_task(worker.watch()): worker.name for worker in trainers.workers.workers}
    try:
        done, _ = await asyncio.wait(watches, timeout=DEATH_DETECTION_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        return [watches[task] for task in done if isinstance(task.exception(), WorkerDied)]
    finally:
        for task in watches:
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody else asks for it
            task.cancel()


async def recover(run: Run, before: Resume) -> Resume:
    """Starts new trainer ranks with the newest state; rollout workers keep the base model and drop all versions.

    `before`, where the ended attempt began, is used again if nothing was kept since. Raises StartError if the base
    weights differ.
    """
    config, trainer = run.prepared.config, run.groups[TRAINER]
    await together(*(trainer.replace(worker.index) for worker in list(trainer.workers)))
    ranks = loaders(trainers=trainer.workers)
    await download_model(run.prepared.model, ranks, seconds=config.deadlines.download)
    rollout = run.groups[ROLLOUT]
    if isinstance(rollout, SubGroup):
        await follow_trainer(run, rollout)
    info = await load_trainer(config, trainer, run.trainers)
    check_base(trainer.workers[0], info["base_digest"], run.base_digest)
    async with asyncio.TaskGroup() as tasks:
        for worker in rollout.workers:
            tasks.create_task(clean_rollout(worker, seconds=config.deadlines.generate))
    resume = newest_state(run, before)
    async with deadline(config.deadlines.load, "load: the trainer's return to the last state"):
        await send_negatives(run.trainers, run.negatives)
        if resume.kept is not None:
            await take_over(run.trainers, resume.kept, resume.held)
            drop_newer(run.directory.checkpoints, resume.version)
        else:
            resume = await restore(run.trainers, run.directory, resume, lambda: newest(run.directory, shares=True))
    run.ledgers.metrics.truncate(resume.version)
    run.ledgers.evaluations.truncate(resume.version)
    run.ledgers.events.event("rollback", step=resume.version, elsewhere=False)
    return resume


def newest_state(run: Run, before: Resume) -> Resume:
    """Returns the newest of the kept state, the checkpoints and `before`. Raises DamagedCheckpoint."""
    kept, evaluations = run.kept.newest(), run.ledgers.evaluations
    try:
        state = newest(run.directory)
    except DamagedCheckpoint:
        if kept is None:
            raise
        state = START
    if kept is not None and kept.version >= state.version:
        state = Resume(None, kept.version, dict(kept.controller), kept=kept, held=kept.packed.held_versions())
    elif state.path is None:
        state = before
    return with_unevaluated(run.prepared.config, state, evaluations)


def with_unevaluated(config: Config, resume: Resume, evaluations: EvaluationLog) -> Resume:
    """Returns `resume` with those of the held versions whose evaluation this run still lacks."""
    stream = POLICY if config.trainer.ema_decay is None else EMA
    held = [(of, version) for of, version in resume.held if of == stream and evaluations.policy(version) is None]
    return replace(resume, held=frozenset(held))


PASS_ON = f"{PackedState.__module__}:{PackedState.passed_on.__qualname__}"


async def take_over(trainers: TrainerGroup, kept: KeptState, held: Collection[tuple[str, int]]) -> None:
    """Gives every trainer rank the kept state and the versions `held`. RuntimeError if their weights then differ."""
    # The first rank passes the state on, so that one copy of it leaves the controller, however many ranks there are.
    ranks, by_node = trainers.workers.workers, dict[str, list[Worker]]()
    packed: Ref = kept.packed
    if len(ranks) > 1:
        _, (packed,) = await ranks[0].call_split(PASS_ON, kept.packed, returns=2)
    for rank in ranks:
        by_node.setdefault(rank.node, []).append(rank)

    async def on_node(there: Sequence[Worker]) -> set[str]:
        # One after the other, so that the node's memory holds one copy at a time besides the object store's.
        return {await rank.call("take_over", kept.digest, packed, tuple(held)) for rank in there}

    try:
        prints = set[str]().union(*await together(*map(on_node, by_node.values())))
    except RefLost as lost:  # The state was on the first rank's node.
        raise WorkerDied(ranks[0].name, str(lost)) from lost
    if len(prints) > 1:
        raise RuntimeError(f"the trainer ranks have different weights after they took over version {kept.version}")


async def follow_trainer(run: Run, rollout: SubGroup) -> None:
    workers = [rollout.follow(worker.index) for worker in list(rollout.workers)]
    seconds = run.prepared.config.deadlines.load
    digests = await together(*(load_rollout(worker, seconds=seconds) for worker in workers))
    for worker, digest in zip(workers, digests, strict=True):
        check_base(worker, digest, run.base_digest)


async def restore(
    trainers: TrainerGroup, directory: RunDirectory, resume: Resume, another: Callable[[], Resume]
) -> Resume:
    """Loads the checkpoint of `resume`, if any, into every trainer rank and removes later checkpoints of the run.

    Ranks that have shares of the weights verify them first, each its own; if one is damaged, the checkpoint that
    `another` returns is loaded instead. Returns the point from which the run goes on.
    """
    if resume.path is None:
        return resume
    resume = await with_sound_shares(trainers, resume, another)
    await trainers.all("restore", str(resume.path), tuple(sorted(resume.held)))
    drop_newer(directory.checkpoints, resume.version)
    return resume


async def with_sound_shares(trainers: TrainerGroup, resume: Resume, another: Callable[[], Resume]) -> Resume:
    """Has every rank verify its share of the checkpoint; returns `resume`, or what `another` returns if one is damaged.

    Raises the errors of `another`, and WorkerFailed if that is damaged, too.
    """
    try:
        await trainers.weights.verify(str(resume.path))
    except WorkerFailed as error:
        if error.kind != DamagedCheckpoint.__name__:
            raise
        resume = await asyncio.to_thread(another)
        if resume.path is None:
            raise
        await trainers.weights.verify(str(resume.path))
    return resume


async def clean_rollout(worker: Worker, *, seconds: float) -> None:
    # If that fails (the worker is dead, hangs, or holds no model yet because it was being replaced), the worker is
    # killed, and the next attempt replaces it.
    try:
        async with deadline(seconds, f"generate: what {worker.name} was doing when a trainer rank died"):
            for lane in ("main", "sync"):
                await worker.call("receiver.clear", lane=lane)
    except (WorkerDied, WorkerFailed, DeadlineExceeded) as error:
        logger.info("%s takes no part in the next attempt: %s", worker.name, error)
        worker.kill()


def steps_of(run: Run, requests: RequestBuilder, resume: Resume) -> AfterStep:
    config, ledgers = run.prepared.config, run.ledgers
    ours = resume.path is not None and resume.path.parent.resolve() == run.directory.checkpoints.resolve()
    if resume.kept is not None:  # Its checkpoint is written only if one is due that is lacking.
        written_already = any(checkpoint_step(path) == resume.version for path in written(run.directory.checkpoints))
        ours = written_already or not checkpoint_due(config, resume.version)
    records = EvaluationRecords(
        config,
        run.directory,
        ledgers.metrics,
        ledgers.monitor,
        ledgers.evaluations,
        ledgers.events,
        ledgers.failures,
        lambda reason: run.stop.ask(reason, exit_codes.HACKING),
    )
    checkpoints = Checkpoints(
        config,
        run.directory,
        run.trainers,
        run.device,
        requests=requests,
        base_digest=run.base_digest,
        schedules=run.schedules,
        saved=[resume.version] if ours else [],
        spare=records.spare,
    )
    return AfterStep(
        ledgers.metrics,
        ledgers.monitor,
        checkpoints,
        ledgers.pools,
        records,
        latent_elements=prod(run.prepared.shapes.latents),
        correction=resolve_correction(run.prepared.config.algorithm, run.prepared.config.max_staleness),
        kept=run.kept,
        held=resume.held_versions,
    )


def context_of(run: Run, requests: RequestBuilder, resume: Resume) -> Context:
    """Returns fresh controller state for an attempt from `resume`, and records the workers in the event log."""
    ledgers, scored = run.ledgers, run.directory.scores
    score_log = ScoreLog(scored, first_step=resume.version) if keeps_scores(requests.config.reward) else None
    ctx = build_context(
        requests,
        run.groups,
        run.trainers,
        ledgers.events,
        run.transport,
        base_digest=run.base_digest,
        resume=resume,
    )
    for worker in [worker for group in run.groups.values() for worker in group.workers]:
        ledgers.events.event("worker", worker=worker.name, pid=worker.pid, node=worker.node)
    return replace(ctx, score_log=score_log, stop_requested=run.stop, servers=run.servers)


def build_context(
    requests: RequestBuilder,
    pools: Mapping[str, WorkerGroup],
    trainers: TrainerGroup,
    observer: EventLog,
    transport: str,
    *,
    base_digest: str,
    resume: Resume = START,
) -> Context:
    """Returns the context of an attempt that begins at `resume`; the rollout workers have joined its ticket table."""
    config = requests.config
    placement = controller_placement(config)

    table, work = TicketTable(shape(config), first_step=resume.version, on_change=observer.event), Signal()
    for worker in pools[ROLLOUT].workers:
        table.join(worker.name)
    return Context(
        config=config,
        requests=requests,
        table=table,
        rollout=pools[ROLLOUT],
        rewards={pool.name: pools[pool.name] for pool in scoring_pools(config)},
        weights=PublishedWeights(
            config,
            table,
            pools[ROLLOUT],
            trainers.weights,
            observer,
            work,
            placement,
            transport,
            resume.held_versions,
        ),
        observer=observer,
        placement=placement,
        base_digest=base_digest,
        work=work,
    )
