"""The end of a run: weights and summary first, then timeline and report, from the trainer and the run's own records."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from async_flowrl.config.schema import Config
from async_flowrl.controller.build import ROLLOUT
from async_flowrl.controller.context import Context
from async_flowrl.observability.evaluation_summary import summarise_evaluations
from async_flowrl.observability.events import Event, effective, read_events
from async_flowrl.observability.pool_size import places
from async_flowrl.observability.run_directory import RunDirectory
from async_flowrl.observability.summary import Outcome, last_attempt, summarise
from async_flowrl.observability.timeline import write_timeline
from async_flowrl.policies.trained_file import save
from async_flowrl.run.best import export_best
from async_flowrl.run.prepare import Prepared
from async_flowrl.run.recovery import Run
from async_flowrl.run.tools import Predict, Report
from async_flowrl.tickets.table import State, TicketTable
from async_flowrl.training.checkpoint import DamagedCheckpoint
from separation.group import Worker
from separation.supervise import deadline

logger = logging.getLogger(__name__)


async def finish(run: Run, ctx: Context, report: Report | None) -> dict[str, Any]:
    """Writes everything that a finished (or stopped) run leaves behind and returns the summary."""
    config, directory, pools = ctx.config, run.directory, run.ledgers.pools
    trainer = run.trainers.first
    average = config.trainer.ema_decay is not None
    async with deadline(config.deadlines.update, "update: the weights at the end of the run"):
        digest = await trainer.call("weights_digest")
        arrays = await trainer.call("tensors", average)
    tensors = {name: torch.from_numpy(value.copy()) for name, value in arrays.items()}
    outcome = Outcome(
        wall_seconds=pools.wall_seconds,
        weights_digest=digest,
        tickets=ticket_counts(ctx.table),
        pools=pools.totals(),
        peak=await peak_of(config, trainer),
        sync=ctx.weights.report(),
    )
    run.ledgers.events.flush()

    def write() -> dict[str, Any]:
        save(directory.trained(config.tune), tensors, config, run.prepared.model)
        history = list(read_events(directory.events))
        summary = summarise(config, run.ledgers.metrics.read(), history, outcome)
        summary["sync"]["worker_stall_seconds"] = worker_stall(history, outcome)
        summary["total_steps"] = config.total_steps
        summary["evaluation_prompts"] = run.prepared.requests.evaluated
        summary["prompts"] = prompts_of(run.prepared)
        summary["warnings"] += forced(history)
        summary["finished"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ledgers = run.ledgers
        evaluated = summarise_evaluations(config, ledgers.evaluations.records)
        summary |= evaluated
        summary["warnings"] += evaluated["hacking"]["alarms"]
        try:
            export_best(config, run.prepared.model, directory, ledgers.evaluations.records)
        except (DamagedCheckpoint, OSError) as error:
            ledgers.failures.append(
                f"{directory.best(config.tune).name}: the best version's checkpoint cannot be read: {error}"
            )
        summary["failed"] = [*ledgers.failures, *ledgers.monitor.failures]
        directory.write_summary(summary)
        late = views(config, directory, report)
        # Now and not with the events: W&B sends the last of its data here, and that can fail, too.
        ledgers.monitor.close()
        failed = [*ledgers.failures, *ledgers.monitor.failures, *late]
        if failed != summary["failed"]:
            summary["failed"] = failed
            directory.write_summary(summary)
        return summary

    return await asyncio.to_thread(write)


def prompts_of(prepared: Prepared) -> dict[str, Any]:
    """What was trained and evaluated, counted."""
    train = prepared.data.train
    return {
        "train": len(train),
        "duplicates": train.duplicates,
        "digest": train.digest,
        "evaluation": len(prepared.requests.evaluation),
        "evaluation_trained": prepared.requests.shared,
    }


def forced(history: Sequence[Event]) -> list[str]:
    """What resume=force went over in the whole run, a sentence each."""
    return [f"resume=force: {each}" for event in history if event["event"] == "inputs" for each in event["forced"]]


def views(config: Config, directory: RunDirectory, report: Report | None) -> list[str]:
    """Writes timeline and report; a sentence for each that failed. They can be made again from the run's files."""
    works: list[tuple[str, Callable[[], object]]] = [
        ("timeline", lambda: write_timeline(directory.events, directory.timeline))
    ]
    if config.monitor.report and report is not None:
        works.append(("report", lambda: report(Path(directory.root))))
    failures = []
    for name, work in works:
        try:
            work()
        except Exception as error:  # whatever it was: the run's results are written already
            logger.exception("the %s could not be written", name)
            failures.append(f"{name}: {type(error).__name__}: {error}")
    return failures


def foresee(predict: Predict, directory: RunDirectory, summary: dict[str, Any]) -> str | None:
    """The planner's sentence about a run that has written its results; where there is none to be had, `failed` in
    `summary` and its file says why."""
    try:
        return predict(directory.root)
    except Exception as error:  # whatever it was: the run's results are written already
        logger.exception("the run could not be compared with its plan")
        summary["failed"].append(f"plan: {type(error).__name__}: {error}")
        directory.write_summary(json.loads(directory.summary.read_text()) | {"failed": summary["failed"]})
        return None


async def peak_of(config: Config, trainer: Worker) -> float | None:
    """FLOP/s of a worker's device: as configured, or as its name says; the pools' devices are alike."""
    if config.hardware.peak_tflops is not None:
        return config.hardware.peak_tflops * 1e12
    known: float | None = await trainer.call("async_flowrl.observability.flops:device_peak")
    return known


def worker_stall(history: Sequence[Event], outcome: Outcome) -> float:
    """Seconds in which a rollout worker (on average) stood still for weights: waiting for them and activating them."""
    _, last = last_attempt(effective(history))
    activated: float = sum(e["end"] - e["start"] for e in last if e["event"] == "span" and e["name"] == "activate")
    waited = outcome.pools[ROLLOUT]
    return waited["wait_weights"] + waited["sync"] + activated / places(last)


def ticket_counts(table: TicketTable) -> dict[str, int]:
    """issued = trained + skipped + failed; retried and duplicate count events beside it."""
    counts = table.counts()
    trained, skipped = counts[State.TRAINED], counts[State.SKIPPED]
    return {
        "issued": table.issued,
        "trained": trained,
        "skipped": skipped,
        "failed": table.issued - trained - skipped,
        "retried": table.retried,
        "duplicate": table.duplicates,
    }
