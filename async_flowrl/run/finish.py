"""Results of a run: `finish` writes weights, summary, timeline and report when the training has ended."""

import asyncio
import json
import logging
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_flowrl.config import exit_codes
from async_flowrl.config.compose import resume_command
from async_flowrl.config.resolution import with_frames, written
from async_flowrl.config.schema import FULL, LORA, Config
from async_flowrl.config.scoring_pools import ROLLOUT
from async_flowrl.controller.context import Context
from async_flowrl.observability.evaluations import Evaluation, read_evaluations
from async_flowrl.observability.events import Event, effective, read_events
from async_flowrl.observability.result import result_sentences, training_sentence
from async_flowrl.observability.run_directory import RunDirectory
from async_flowrl.observability.summary import (
    best_row,
    last_attempt,
    mfu,
    places,
    summarise,
    summarise_evaluations,
)
from async_flowrl.observability.terminal import named_lines, say
from async_flowrl.observability.timeline import write_timeline
from async_flowrl.policies.checked import in_diffusers
from async_flowrl.policies.registry import FAMILIES, ResolvedModel, load_family
from async_flowrl.policies.tuning import tuning_of
from async_flowrl.rewards.call import MAX_PROMPT
from async_flowrl.run.describe import shown
from async_flowrl.run.prepare import Prepared
from async_flowrl.run.recovery import Run
from async_flowrl.run.stopping import StopRequest
from async_flowrl.tickets.table import State, TicketTable
from async_flowrl.training.checkpoint import DamagedCheckpoint, checkpoint_step, find_checkpoint, read_checkpoint
from async_flowrl.types import ACTIVATE

logger = logging.getLogger(__name__)


async def finish(run: Run, ctx: Context) -> dict[str, Any]:
    """Writes the results of a finished or stopped run and returns the summary, whose `failed` names what could not be.

    Raises DamagedCheckpoint if the last checkpoint, which has the weights, cannot be read.
    """
    config, directory, pools = ctx.config, run.directory, run.ledgers.pools
    # The last checkpoint has the weights, so that no process has to live any longer.
    checkpoint = await asyncio.to_thread(read_checkpoint, directory.checkpoints / f"step_{ctx.table.step}")
    tensors = checkpoint.tensors["weights" if config.trainer.ema_decay is None else "ema"]
    counted = {
        "wall_seconds": pools.wall_seconds,
        "weights_digest": checkpoint.trainer["weights_digest"],
        "tickets": ticket_counts(ctx.table),
        "pools": pools.totals(),
        "sync": ctx.weights.report(),
    }
    run.ledgers.events.flush()

    def write() -> dict[str, Any]:
        tuning_of(config).save(directory.trained(config.tune), tensors, run.prepared.model, config.model.path)
        history = list(read_events(directory.events))
        summary = summarise(config, run.ledgers.metrics.read(), history, counted, run.peak_flops)
        summary["sync"]["worker_stall_seconds"] = worker_stall(history, summary["pools"][ROLLOUT])
        summary["steps"] = ctx.table.step  # Also where another run's checkpoint had all of them.
        summary["total_steps"] = config.total_steps
        summary["evaluation_prompts"] = run.prepared.requests.evaluated
        summary["prompts"] = prompts_of(run.prepared)
        summary["warnings"] += [
            *forced(history),
            *ctx.reward_calls.warnings().values(),
            *filter(None, ctx.warned.values()),
        ]
        summary["finished"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ledgers = run.ledgers
        evaluated = summarise_evaluations(config, ledgers.evaluations.records)
        summary |= evaluated
        summary["warnings"] = [*evaluated["hacking"]["alarms"], *summary["warnings"]]
        try:
            export_best(config, run.prepared.model, directory, ledgers.evaluations.records)
        except (DamagedCheckpoint, OSError) as error:
            ledgers.failures.append(
                f"{directory.best(config.tune).name}: the best version's checkpoint cannot be read: {error}"
            )
        summary["failed"] = [*ledgers.failures, *ledgers.monitor.failures]
        directory.write_summary(summary)
        late = views(config, directory)
        # The monitor is closed here, before `failed` is final: W&B sends its last data now, which can fail.
        ledgers.monitor.close()
        failed = [*ledgers.failures, *ledgers.monitor.failures, *late]
        if failed != summary["failed"]:
            summary["failed"] = failed
            directory.write_summary(summary)
        return summary

    return await asyncio.to_thread(write)


def nothing_to_do(config: Config, directory: RunDirectory, version: int) -> str | None:
    """Returns a sentence if a resume at `version` would find every step made and the trained weights; else None."""
    if version < config.total_steps or not any(directory.trained(config.tune).glob("*.safetensors")):
        return None
    try:
        summary = json.loads(directory.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if summary["steps"] != version or version < summary["total_steps"] or summary["failed"]:
        return None
    return f"{shown(directory.root)} is finished after {version} steps: total_steps={config.total_steps} adds none"


def prompts_of(prepared: Prepared) -> dict[str, Any]:
    train = prepared.data.train
    return {
        "train": len(train),
        "duplicates": train.duplicates,
        "digest": train.digest,
        "evaluation": len(prepared.requests.evaluation),
        "evaluation_trained": prepared.requests.shared,
    }


def forced(history: Sequence[Event]) -> list[str]:
    return [f"resume=force: {text}" for event in history if event["event"] == "inputs" for text in event["forced"]]


def views(config: Config, directory: RunDirectory) -> list[str]:
    """Writes timeline and report, which can be made again from the files; returns a sentence for each that failed."""

    def report() -> None:
        from async_flowrl.report.page import write_page

        write_page([directory.root], directory.report)

    works: list[tuple[str, Callable[[], object]]] = [
        ("timeline", lambda: write_timeline(directory.events, directory.timeline))
    ]
    if config.monitor.report:
        works.append(("report", report))
    failures = []
    for name, work in works:
        try:
            work()
        except Exception as error:  # any error: the run's results are written already
            logger.exception("the %s could not be written", name)
            failures.append(f"{name}: {type(error).__name__}: {error}")
    return failures


def worker_stall(history: Sequence[Event], waited: Mapping[str, float]) -> float:
    """Returns the seconds that a rollout worker lost on average by waiting for, receiving and activating versions."""
    # Waiting and receiving count from the start of this process, activation only since the last rollback.
    _, last = last_attempt(effective(history))
    activated: float = sum(e["end"] - e["start"] for e in last if e["event"] == "span" and e["name"] == ACTIVATE)
    return waited["wait_weights"] + waited["sync"] + activated / max(1, places(last))


def ticket_counts(table: TicketTable) -> dict[str, int]:
    """Returns the numbers of tickets: issued = trained + skipped + failed; `retried` and `duplicate` count events."""
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


def export_best(
    config: Config, model: ResolvedModel, directory: RunDirectory, history: Sequence[Evaluation]
) -> Path | None:
    """Writes the weights of the best version to lora_best/ or transformer_best/, if there is one.

    Raises DamagedCheckpoint or OSError.
    """
    row = best_row(config, history)
    if row is None:
        return None
    version = row["version"]
    tensors = read_checkpoint(directory.checkpoints / f"step_{version}").tensors
    if config.trainer.ema_decay is not None:
        evaluated = tensors["ema"]
    else:
        prefix = f"{version}/"
        evaluated = {n.removeprefix(prefix): t for n, t in tensors["retained"].items() if n.startswith(prefix)}
    return tuning_of(config).save(directory.best(config.tune), dict(evaluated), model, config.model.path)


LABEL_CHARACTERS = 8  # Width of the label before each line, in characters.
TRAINED = {LORA: "LoRA", FULL: "weights"}  # Value of `tune` → what stands before the path of what was trained.


@dataclass(frozen=True)
class Ending:
    prepared: Prepared
    directory: RunDirectory
    stop: StopRequest
    # Name → text of the files in `.hydra/`; empty if the run was not started from a command line.
    hydra_record: Mapping[str, str]

    @property
    def quiet(self) -> bool:
        return self.prepared.config.console == "quiet"

    def say(self, label: str, text: object) -> None:
        say(named_lines([(label, text)], LABEL_CHARACTERS))

    @property
    def goes_on(self) -> str:
        return resume_command(self.hydra_record) or "the same command with resume=auto"


def conclude(ending: Ending, summary: Mapping[str, Any]) -> int:
    stop, early = ending.stop, ending.stop() and summary["steps"] < summary["total_steps"]
    hacked = early and stop.code == exit_codes.HACKING
    if early:
        instead = " and evaluate.on_hacking=warn" if hacked else ""
        say(f"stopped by {stop.reason} after step {summary['steps']}; continue with resume=auto{instead}\n")
    if not ending.quiet:
        if not early or hacked:
            results(ending, summary)
        else:
            say_result(ending, summary)
    for sentence in summary["failed"]:
        ending.say("failed", sentence)
    if not ending.quiet:
        ending.say("next", following(ending, summary, early=early))
    if early:
        return stop.code
    return exit_codes.INCOMPLETE if summary["failed"] else exit_codes.OK


def results(ending: Ending, summary: Mapping[str, Any]) -> None:
    say, directory, tune = ending.say, ending.directory, ending.prepared.config.tune
    say_result(ending, summary)
    if share := mfu(summary):
        say("MFU", share)
    if peaks := summary["memory"]:
        say("memory", ", ".join(f"{pool} {gib:.1f} GiB" for pool, gib in peaks.items()))
    if row := summary["evaluations"]["best"]:
        say("best", f"{shown(directory.best(tune))} (version {row['version']}, {row['curve']} {row['mean']:.4g})")
    trained = (TRAINED[tune], directory.trained(tune))
    for label, path in (trained, ("report", directory.report), ("images", directory.images)):
        if path != directory.report or path.exists():
            say(label, shown(path))
    say("summary", shown(directory.summary))
    for sentence in summary["warnings"]:
        say("warning", sentence)


def say_result(ending: Ending, summary: Mapping[str, Any]) -> None:
    history = read_evaluations(ending.directory.evaluations)
    sentences = result_sentences(history, str(summary.get("evaluation_prompts")))
    for sentence in sentences or [training_sentence(summary["reward_first"], summary["reward_last"])]:
        ending.say("result", sentence)


def following(ending: Ending, summary: Mapping[str, Any], *, early: bool) -> str:
    root = shlex.quote(shown(ending.directory.root))
    if early and ending.stop.code == exit_codes.HACKING:
        return (
            f"look whether the images are better, too: {shown(ending.directory.images)} and docs/reward_hacking.md\n"
            f"{'':{LABEL_CHARACTERS}} to go on all the same: {ending.goes_on} evaluate.on_hacking=warn"
        )
    if early:
        return ending.goes_on
    name = ending.prepared.model.family
    sampled = name in FAMILIES or in_diffusers(load_family(name).pipeline)  # by generate and evaluate
    if summary["failed"]:
        anew = f"async-flowrl report {root} (writes the report anew)"
        score = f"async-flowrl evaluate {root} (trained weights and summary are whole: it scores them)"
        return f"{score}\n{'':{LABEL_CHARACTERS}} {anew}" if sampled else anew
    if ending.prepared.model.random:
        return "the same with model.weights=files: what random weights have learned is of no use"
    if not sampled:
        return f"async-flowrl export {root} OUT"
    prompts = ending.prepared.requests.evaluation or ending.prepared.requests.train
    own = prompts[0].resolution
    size = "" if own is None else f" --resolution {written(with_frames(own, ending.prepared.config.rollout.frames))}"
    folder = ending.directory.trained(ending.prepared.config.tune)
    trained = f"--{folder.name} {shlex.quote(shown(folder))}"
    out = shlex.quote(shown(ending.directory.root / "before_after.png"))
    edited = "".join(f" --image {shlex.quote(image.path)}" for image in prompts[0].images)
    text = shlex.quote(prompts[0].text[:MAX_PROMPT])
    return (
        f"async-flowrl generate {trained} --prompt {text}{edited}{size} --out {out}\n"
        f"{'':{LABEL_CHARACTERS}} async-flowrl evaluate {root}"
    )


def after_failure(ending: Ending) -> None:
    """Prints how to continue a run that failed; prints nothing without a checkpoint or with `console=quiet`."""
    path = find_checkpoint(ending.directory.checkpoints, shares=False)
    if path is not None and not ending.quiet:
        ending.say("next", f"{ending.goes_on} (goes on from step {checkpoint_step(path)})")
