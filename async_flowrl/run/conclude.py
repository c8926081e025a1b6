"""Last lines that a run prints: its results, where they are, and the command to type next. `run/job.py` calls it."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_flowrl.config import exit_codes
from async_flowrl.config.resolution import written
from async_flowrl.config.schema import FULL, LORA
from async_flowrl.config.typed import resume_command
from async_flowrl.observability.evaluations import read_evaluations
from async_flowrl.observability.result import result_sentences, training_sentence
from async_flowrl.observability.run_directory import RunDirectory
from async_flowrl.observability.summary import mfu
from async_flowrl.observability.terminal import named_lines, say
from async_flowrl.rewards.call import MAX_PROMPT
from async_flowrl.run.prepare import Prepared
from async_flowrl.run.stopping import StopRequest
from async_flowrl.training.checkpoint import checkpoint_step, find_checkpoint

LABEL_CHARACTERS = 8
"""Width of the label before each line, in characters."""
TRAINED = {LORA: "LoRA", FULL: "weights"}
"""Value of `tune` → what stands before the path of what was trained."""
MAX_WARNINGS = 5
"""Most warnings of the summary that are printed."""


@dataclass(frozen=True)
class Ending:
    """Facts about a run that its last lines need."""

    prepared: Prepared
    directory: RunDirectory
    stop: StopRequest
    hydra_record: Mapping[str, str]
    """Name → text of the files in `.hydra/`; empty if the run was not started from a command line."""

    @property
    def quiet(self) -> bool:
        return self.prepared.config.console == "quiet"

    def say(self, label: str, text: object, *, whole: bool = False) -> None:
        """Prints a line. `whole`: it is not wrapped, because it is a path or a command that people copy."""
        say(f"{label:{LABEL_CHARACTERS}} {text}\n" if whole else named_lines([(label, text)], LABEL_CHARACTERS))

    @property
    def goes_on(self) -> str:
        """Command that continues the run: the command line that started it, with `resume=auto`."""
        return resume_command(self.hydra_record) or "the same command with resume=auto"


def conclude(ending: Ending, summary: Mapping[str, Any]) -> int:
    """Prints how the run ended and returns the exit code (see `config/exit_codes.py`)."""
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
        ending.say("next", following(ending, summary, early=early), whole=True)
    if early:
        return stop.code
    return exit_codes.INCOMPLETE if summary["failed"] else exit_codes.OK


def results(ending: Ending, summary: Mapping[str, Any]) -> None:
    """Prints the results, the paths of the files, and the first warnings."""
    say, directory, tune = ending.say, ending.directory, ending.prepared.config.tune
    say_result(ending, summary)
    if known := mfu(summary):
        say("MFU", known)
    if row := summary["evaluations"]["best"]:
        say("best", f"{directory.best(tune)} (version {row['version']}, {row['curve']} {row['mean']:.4g})")
    trained = (TRAINED[tune], directory.trained(tune))
    for label, path in (trained, ("report", directory.report), ("images", directory.images)):
        if path != directory.report or path.exists():
            say(label, path, whole=True)
    say("summary", directory.summary, whole=True)
    for sentence in summary["warnings"][:MAX_WARNINGS]:
        say("warning", sentence)
    if len(summary["warnings"]) > MAX_WARNINGS:
        say("warning", f"{len(summary['warnings']) - MAX_WARNINGS} more in summary.json")


def say_result(ending: Ending, summary: Mapping[str, Any]) -> None:
    """Prints what the evaluations show, or the training's rewards if no two evaluations can be compared."""
    history = read_evaluations(ending.directory.evaluations)
    sentences = result_sentences(history, str(summary.get("evaluation_prompts")))
    for sentence in sentences or [training_sentence(summary["reward_first"], summary["reward_last"])]:
        ending.say("result", sentence)


def following(ending: Ending, summary: Mapping[str, Any], *, early: bool) -> str:
    """Returns the command to type next."""
    root = shlex.quote(shown(ending.directory.root))
    if early and ending.stop.code == exit_codes.HACKING:
        return (
            f"look whether the images are better, too: {shown(ending.directory.images)} and docs/reward_hacking.md\n"
            f"{'':{LABEL_CHARACTERS}} to go on all the same: {ending.goes_on} evaluate.on_hacking=warn"
        )
    if early:
        return ending.goes_on
    if summary["failed"]:
        return (
            f"async-flowrl evaluate {root} (trained weights and summary are whole: it scores them)\n"
            f"{'':{LABEL_CHARACTERS}} async-flowrl report {root} (writes the report anew)"
        )
    if ending.prepared.model.random:
        return "the same with model.weights=files: what random weights have learned is of no use"
    prompts = ending.prepared.requests.evaluation or ending.prepared.requests.train
    size = "" if prompts[0].resolution is None else f" --resolution {written(prompts[0].resolution)}"
    folder = ending.directory.trained(ending.prepared.config.tune)
    trained = f"--{folder.name} {shlex.quote(shown(folder))}"
    out = shlex.quote(shown(ending.directory.root / "before_after.png"))
    return (
        f"async-flowrl generate {trained} --prompt {shlex.quote(prompts[0].text[:MAX_PROMPT])}{size} --out {out}\n"
        f"{'':{LABEL_CHARACTERS}} async-flowrl evaluate {root}"
    )


def after_failure(ending: Ending) -> None:
    """Prints how to continue a run that failed; prints nothing without a checkpoint or with `console=quiet`."""
    path = find_checkpoint(ending.directory.checkpoints, shares=False)
    if path is not None and not ending.quiet:
        ending.say("next", f"{ending.goes_on} (goes on from step {checkpoint_step(path)})", whole=True)


def shown(path: Path) -> str:
    """Returns the path, relative to the working directory if that is shorter."""
    return min(str(path), os.path.relpath(path), key=len)
