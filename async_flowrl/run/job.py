"""`run` executes one training run: it prepares the configuration, starts the pools, trains, and writes the results."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from async_flowrl.config import exit_codes
from async_flowrl.config.check import ConfigError
from async_flowrl.config.schema import Config
from async_flowrl.config.scoring_pools import ROLLOUT, TRAINER
from async_flowrl.controller.admission import download_model, loaders
from async_flowrl.controller.resume import Resume, check_model, find_resume, inputs_of, warn_of_differences
from async_flowrl.controller.reward_servers import ServerLost, serving
from async_flowrl.controller.score_log import forget_scores
from async_flowrl.controller.trainer import TrainerGroup
from async_flowrl.observability.console import Display, open_display
from async_flowrl.observability.evaluations import EvaluationLog
from async_flowrl.observability.events import EventLog
from async_flowrl.observability.ledger import PoolLedger
from async_flowrl.observability.metrics import MetricsLog
from async_flowrl.observability.monitor import Monitor
from async_flowrl.observability.run_directory import ATTEMPT, RunDirectory
from async_flowrl.observability.terminal import refuse, say
from async_flowrl.run.describe import dry_run_lines, first_lines
from async_flowrl.run.finish import Ending, after_failure, conclude, finish, nothing_to_do
from async_flowrl.run.launch import (
    check_machine,
    check_pools,
    check_stored,
    encode_negatives,
    load_pools,
    open_cluster,
    send_negatives,
)
from async_flowrl.run.nodes import check_memory
from async_flowrl.run.precheck import CheckedConfig
from async_flowrl.run.prepare import OUR_OWN, Prepared, Workers, doubts_of, prepare
from async_flowrl.run.recovery import Ledgers, Run, restore, train_with_recovery, with_unevaluated
from async_flowrl.run.stopping import StopRequest, ctrl_c_asks, sigterm_asks, time_limited
from async_flowrl.training.checkpoint import checkpoint_step, find_checkpoint
from separation.group import WorkerDied, WorkerFailed
from separation.node import OtherCode
from separation.resources import ResourcesMissing, StoreTooSmall
from separation.supervise import deadline, leaves

logger = logging.getLogger(__name__)


def run(
    config: CheckedConfig,
    hydra_record: Mapping[str, str] = MappingProxyType({}),
    workers: Workers = OUR_OWN,
) -> int:
    """Runs a configuration and returns the exit code; a failure is one sentence on stderr.

    `hydra_record` is name → text of the files in `.hydra/`; `workers` are classes of tests and benchmarks.
    """
    directory = RunDirectory(Path(config.output_dir))
    with ExitStack() as last:
        last.callback(end_log, directory.logs)
        try:
            prepared = replace(prepare(config, whole=config.dry_run), workers=workers)
            check_machine(prepared)
            if config.resume != "never" and not config.dry_run and directory.logs.is_dir():
                log_to(directory.logs / "controller.log")  # find_resume logs a warning for each damaged checkpoint
            # This comes before the first write to the run directory, so a refused run leaves the directory unchanged.
            # Only damaged shares of a checkpoint are found later, by their ranks.
            resume = find_resume(prepared.requests, directory)
            if sentence := nothing_to_do(prepared.config, directory, resume.version):
                say(f"{sentence}\n")
                return exit_codes.OK
            if config.dry_run:
                directory.claim()
                say(dry_run_lines(prepared, directory.root, resume))
                return exit_codes.OK
            directory.create(prepared.config, hydra_record)
        except ConfigError as error:
            return refuse(error, exit_codes.CONFIG)
        log_to(directory.logs / "controller.log")
        logger.info(ATTEMPT)
        say(first_lines(prepared, directory.root, resume))
        ending = Ending(prepared, directory, StopRequest(), hydra_record)
        for sentence in doubts_of(prepared):
            logger.warning("%s", sentence)
        try:
            with closing(open_display(prepared.config)) as display:
                return asyncio.run(train(ending, resume, display))
        except KeyboardInterrupt:
            after_failure(ending)
            return refuse("interrupted", exit_codes.INTERRUPTED)
        except Exception as error:
            if (refusal := refused(error, config)) is not None:
                return refuse(refusal, exit_codes.CONFIG)
            logger.exception("the run failed")
            after_failure(ending)
            return refuse(
                f"the run failed: {first_cause(error)} (traceback in {directory.logs}/controller.log)", exit_codes.ERROR
            )
        finally:
            directory.release()


async def train(ending: Ending, resume: Resume, display: Display) -> int:
    # Raises the run's failure, unless the run was asked to stop, lost workers or servers meanwhile, and has a
    # checkpoint.
    stop, directory = ending.stop, ending.directory
    try:
        summary = await train_until(ending, resume, display)
        return conclude(ending, summary)
    except Exception as error:
        if (version := last_resort(error, stop, directory)) is None:
            raise
        logger.exception("workers died after the run was asked to stop")
        say(
            f"stopped by {stop.reason}, which ended workers too ({first_cause(error)}); "
            f"continue from step {version} with resume=auto\n"
        )
        return exit_codes.RESUMABLE


def last_resort(error: BaseException, stop: StopRequest, directory: RunDirectory) -> int | None:
    """Returns the step of the newest sound checkpoint if the run can end as stopped in spite of `error`, else None."""
    # It can if it was asked to stop and `error` is the death of a worker or server: a scheduler that asks a run to stop
    # often ends the workers as well. Shares of several ranks are not read for it.
    if not stop() or not isinstance(leaves(error)[0], WorkerDied | ServerLost):
        return None
    path = find_checkpoint(directory.checkpoints, shares=False)
    return None if path is None else checkpoint_step(path)


async def train_until(ending: Ending, resume: Resume, display: Display) -> dict[str, Any]:
    prepared, directory, stop = ending.prepared, ending.directory, ending.stop
    display.phase("starting the pools")
    with time_limited(stop, prepared.config.time_limit), ExitStack() as last:
        async with open_cluster(prepared, directory.logs) as groups, serving(prepared.config, groups) as servers:
            trainers = TrainerGroup(groups[TRAINER], prepared.algorithm)
            prepared, devices, transport = await check_pools(prepared, groups, trainers)
            config = prepared.config
            display.phase("loading the models")
            everyone = loaders(groups[ROLLOUT].workers, groups[TRAINER].workers)
            await download_model(prepared.model, everyone, seconds=config.deadlines.download)
            await check_memory(prepared, groups, devices, directory.root)
            info = await load_pools(config, groups, trainers)
            check_stored(prepared, info["trainable_parameters"])
            transport = trainers.weights.transport(config, transport)
            resume = compared(prepared, directory, resume, info)
            async with deadline(config.deadlines.load, "load: negative prompts, and the checkpoint to go on from"):
                negatives = await encode_negatives(prepared, groups[ROLLOUT].workers[0])
                await send_negatives(trainers, negatives)
                resume = await restore(trainers, directory, resume, lambda: another(prepared, directory, info))
            ledgers = open_ledgers(prepared, directory, resume, display)
            display.begin()
            try:
                run = Run(
                    prepared,
                    directory,
                    groups,
                    trainers,
                    ledgers,
                    stop,
                    info["base_digest"],
                    info["schedules"],
                    info["device"],
                    transport,
                    negatives,
                    info["peak_flops"],
                    servers,
                )
                await servers.all_up(ledgers.events, ledgers.failures)
                last.enter_context(sigterm_asks(stop))  # also while the pools end
                with ctrl_c_asks(stop):
                    ctx = await train_with_recovery(run, resume)
                    return await finish(run, ctx)
            finally:
                ledgers.events.close()
                ledgers.monitor.close()


def compared(prepared: Prepared, directory: RunDirectory, resume: Resume, info: Mapping[str, Any]) -> Resume:
    resume = check_model(prepared.config, resume, info)
    warn_of_differences(prepared.config, resume, info["device"])
    return with_unevaluated(prepared.config, resume, EvaluationLog(directory.evaluations))


def another(prepared: Prepared, directory: RunDirectory, info: Mapping[str, Any]) -> Resume:
    """Returns the checkpoint to go on from if a trainer rank has found its share of the first choice damaged."""
    return compared(prepared, directory, find_resume(prepared.requests, directory, shares=True), info)


def open_ledgers(
    prepared: Prepared,
    directory: RunDirectory,
    resume: Resume,
    display: Display | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Ledgers:
    """Opens event log, metrics, evaluations and monitor; removes what a resumed run's checkpoint does not know."""
    config = prepared.config
    pools = PoolLedger(clock)
    continued = resume.path is not None or directory.events.exists()
    events = EventLog(directory.events, clock, offset=time.time() - clock(), ledger=pools)
    metrics = MetricsLog(directory.metrics)
    metrics.truncate(resume.version)
    evaluations = EvaluationLog(directory.evaluations)
    evaluations.truncate(resume.version)
    if resume.forced:
        forget_scores(directory.scores, step=resume.version)
    if continued:
        elsewhere = resume.path is not None and resume.path.parent.resolve() != directory.checkpoints.resolve()
        events.event("rollback", step=resume.version, elsewhere=elsewhere)
    events.event("inputs", **inputs_of(prepared.requests), forced=list(resume.forced), placement=config.placement)
    monitor = Monitor(config.monitor, directory.root, name=config.name, settings=asdict(config), display=display)
    return Ledgers(events, pools, metrics, evaluations, monitor)


def stored(config: Config) -> str:
    what = f"images and trajectories of {config.live_versions} steps, and weights on their way to rollout workers"
    what += ", and the trainer's state" if config.keeps_state else ""
    fewer = "fewer or smaller images per step, a smaller max_staleness"
    fewer += ", a smaller checkpoint_engine.bucket_bytes" if config.in_shares else ""
    return f"{what}; use {fewer}, or a Ray cluster with a larger store"


def refused(error: Exception, config: Config) -> str | None:
    """Returns the sentence if the error means that the run cannot start as it is configured; None for a failure."""
    if isinstance(error, StoreTooSmall):
        return f"{error}: {stored(config)}"
    if isinstance(error, ConfigError | ResourcesMissing | OtherCode):
        return str(error)
    # An example is a LoRA for layers that do not exist.
    cause = leaves(error)[0]
    loading = isinstance(cause, WorkerFailed) and cause.method in ("load", "restore") and cause.kind == "ValueError"
    return cause.message if isinstance(cause, WorkerFailed) and loading else None


def first_cause(error: BaseException) -> str:
    cause = leaves(error)[0]
    return f"{type(cause).__name__}: {cause}"


def log_to(path: Path) -> None:
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    console = logging.StreamHandler()
    console.setLevel(logging.WARNING)
    console.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    console.addFilter(lambda record: record.exc_info is None)
    logging.basicConfig(level=logging.INFO, handlers=[handler, console], force=True)


def end_log(folder: Path) -> None:
    """Closes the log files in a folder, because the process may go on with something else or move the folder."""
    root, place = logging.getLogger(), os.path.abspath(folder)
    for handler in list(root.handlers):
        if isinstance(handler, logging.FileHandler) and os.path.dirname(handler.baseFilename) == place:
            root.removeHandler(handler)
            with suppress(OSError):  # the disk is full
                handler.close()
