"""async-flowrl verify RUN_DIR: check of a finished run from its files alone, importing nothing that it names.

A number that the run has written is not trusted if it can be computed here. Each check returns its finding in words,
and raises Broken if the files contradict the guarantee.
"""

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from async_flowrl.config.compose import read_config
from async_flowrl.config.error_text import first_line, parsed
from async_flowrl.data.load import load_data
from async_flowrl.observability.events import Event, effective, read_events
from async_flowrl.observability.terminal import refuse
from async_flowrl.training.checkpoint import (
    RANKS,
    Checkpoint,
    DamagedCheckpoint,
    checkpoint_step,
    find_checkpoint,
    read_checkpoint,
)
from async_flowrl.types import EVALUATION, TRAIN
from checkpoint_engine import Draft, Layout, weights_digest
from checkpoint_engine.digest import combine
from checkpoint_engine.gather import shard_rows
from separation.text_table import format_table

FINAL_STATES = ("TRAINED", "SKIPPED")


class Broken(ValueError):
    """Raised if the files contradict a guarantee."""


@dataclass(frozen=True)
class RunFiles:
    root: Path
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    history: list[Event]  # The events without those that a return to a checkpoint has undone.

    @classmethod
    def read(cls, root: Path) -> "RunFiles":
        """Reads a run directory. FileNotFoundError if the run is not finished, ValueError if a file is not JSON."""
        lines = (root / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        metrics = [parsed(line, f"{root / 'metrics.jsonl'}:{number}") for number, line in enumerate(lines, 1)]
        summary = parsed((root / "summary.json").read_text(encoding="utf-8"), str(root / "summary.json"))
        return cls(root, summary, metrics, effective(read_events(root / "events.jsonl")))

    @property
    def max_staleness(self) -> int:
        return int(self.summary["max_staleness"])

    @property
    def steps(self) -> int:
        return int(self.summary["steps"])

    @property
    def began(self) -> int:
        """The first step: 0, or that of another run's checkpoint, from which this one went on."""
        opening = list(takewhile(lambda event: event["event"] != "ticket", self.history))
        rollbacks = [event for event in opening if event["event"] == "rollback"]
        return int(rollbacks[-1]["step"]) if any(event.get("elsewhere") for event in rollbacks) else 0

    @cached_property
    def finished(self) -> list[Event]:
        return [e for e in self.history if e["event"] == "ticket" and e["kind"] == TRAIN and e["state"] in FINAL_STATES]

    @cached_property
    def sent(self) -> dict[tuple[str, int], set[str]]:
        """(stream, version) → the digests with which it was sent."""
        sent: dict[tuple[str, int], set[str]] = defaultdict(set)
        for event in self.history:
            if event["event"] == "version" and event["state"] == "sent":
                sent[event["stream"], event["version"]].add(event["digest"])
        return sent


def bound(run: RunFiles) -> str:
    """Checks that each trained sample has the version that its step names, and is not older than max_staleness."""
    ages: Counter[int] = Counter()
    for event in run.finished:
        age = event["step"] - event["version"]
        if age != min(event["step"], run.max_staleness):
            raise Broken(f"ticket {event['ordinal']} of step {event['step']} is {age} versions old")
        ages[age] += 1
    for line in run.metrics:
        if (line.get("staleness/max") or 0) > run.max_staleness:
            raise Broken(f"metrics.jsonl says staleness {line['staleness/max']} at step {line['step']}")
    return ", ".join(f"{count} tickets of age {age}" for age, count in sorted(ages.items()))


def exactly_once(run: RunFiles) -> str:
    """Checks that every ticket was trained or skipped once, in the step that its number names, step after step."""
    ordinals = [event["ordinal"] for event in run.finished]
    twice = [ordinal for ordinal, count in Counter(ordinals).items() if count > 1]
    if twice:
        raise Broken(f"tickets {sorted(twice)[:5]} were finished more than once")
    per_step = Counter(sorted(event["step"] for event in run.finished))
    first = run.began * max(per_step.values(), default=0)
    missing = sorted(set(range(first, max(ordinals, default=-1) + 1)) - set(ordinals))
    if missing:
        raise Broken(f"tickets {missing[:5]} were never finished")
    if sorted(per_step) != list(range(run.began, run.steps)) or len(set(per_step.values())) > 1:
        raise Broken(f"{run.steps - run.began} steps should have equally many tickets, have {dict(per_step)}")
    if per_step:
        _one_step_after_the_other(run, per_step[run.began])
    if [line["step"] for line in run.metrics] != list(range(run.began, run.steps)):
        raise Broken(f"metrics.jsonl has not one line for each of {len(per_step)} steps")
    skipped = sum(event["state"] == "SKIPPED" for event in run.finished)
    return f"{len(ordinals)} tickets in {len(per_step)} steps" + (f", {skipped} of them skipped" if skipped else "")


def _one_step_after_the_other(run: RunFiles, per_step: int) -> None:
    # Raises Broken if a ticket was handed to the trainer before all tickets of the step before were finished.
    ended: Counter[int] = Counter()
    last: dict[int, str] = {}
    for event in run.history:
        if event["event"] != "ticket" or event["kind"] != TRAIN:
            continue
        ordinal, step, state = event["ordinal"], event["step"], event["state"]
        if ordinal // per_step != step:
            raise Broken(f"ticket {ordinal} belongs to step {ordinal // per_step}, and stands in step {step}")
        if state == "HANDED" and step > run.began and ended[step - 1] != per_step:
            raise Broken(f"ticket {ordinal} of step {step} was handed over before step {step - 1} had ended")
        if state in FINAL_STATES:
            if last.get(ordinal) != "HANDED":
                raise Broken(f"ticket {ordinal} was finished without having been handed over")
            ended[step] += 1
        last[ordinal] = state


def version_chain(run: RunFiles) -> str:
    """Checks that every version has one digest in all attempts, and that acknowledgements and samples have it."""
    for (stream, version), digests in sorted(run.sent.items()):
        if len(digests) > 1:
            raise Broken(f"version {version} of {stream} was sent with {len(digests)} different digests")
    versions = {version for stream, version in run.sent if stream == "policy"}
    lacking = sorted(set(range(max(0, run.began - run.max_staleness), run.steps + 1)) - versions)
    if lacking:
        raise Broken(f"versions {lacking[:5]} were never sent")
    acknowledged = 0
    for event in run.history:
        if event["event"] == "version" and event["state"] == "acknowledged":
            acknowledged += 1
            if {event["digest"]} != run.sent.get((event["stream"], event["version"])):
                raise Broken(f"{event['worker']} acknowledged other bytes as version {event['version']} than were sent")
        if event["event"] == "ticket" and event["state"] in FINAL_STATES:
            streams = ("policy",) if event["kind"] == TRAIN else ("policy", "ema")
            if not any(event["digest"] in run.sent.get((stream, event["version"]), ()) for stream in streams):
                kind = "evaluation ticket" if event["kind"] == EVALUATION else "ticket"
                raise Broken(f"{kind} {event['ordinal']} was made with weights never sent as {event['version']}")
    return f"{len(versions)} versions, {acknowledged} acknowledgements"


def inputs(run: RunFiles) -> str:
    """Checks that all attempts trained on the same prompts and no resume was forced."""
    attempts = [event for event in run.history if event["event"] == "inputs"]
    if not attempts:
        raise Broken("events.jsonl does not say which prompts were trained")
    for event in attempts:
        if event["forced"]:
            raise Broken(f"resume=force: {'; '.join(event['forced'])}")
    if len(digests := {event["train"] for event in attempts}) > 1:
        raise Broken(f"{len(digests)} different sets of prompts were trained, one after the other")
    last = attempts[-1]
    return f"{last['train_prompts']} training prompts, {prompts_now(run.root, last['train'])}"


def prompts_now(root: Path, digest: str) -> str:
    try:
        config = read_config(root / "config.yaml")
        data = load_data(config.data, needs_target=False)
    except (ValueError, OSError) as error:
        return f"whose file cannot be compared here: {first_line(error)}"
    return f"data.train={config.data.train} {'is unchanged' if data.train.digest == digest else 'was edited since'}"


def digests(run: RunFiles) -> str:
    """Checks that the newest checkpoint is sound, and its masters those of summary.json and the last version."""
    path = find_checkpoint(run.root / "checkpoints")
    if path is None:
        raise Broken("there is no sound checkpoint")
    checkpoint = read_checkpoint(path)
    digest = _masters(checkpoint)
    if digest != checkpoint.trainer["weights_digest"]:
        raise Broken(f"{path.name} holds weights {digest[:16]}, says {checkpoint.trainer['weights_digest'][:16]}")
    if checkpoint_step(path) != run.steps:
        raise Broken(f"the newest sound checkpoint is {path.name}, the run ended at version {run.steps}")
    if digest != run.summary["weights_digest"]:
        raise Broken(f"{path.name} holds weights {digest[:16]}, summary.json says {run.summary['weights_digest'][:16]}")
    for version, sent in checkpoint.controller.get("published", {}).items():
        if {sent} != run.sent.get(("policy", int(version))):
            raise Broken(f"{path.name} names another digest for version {version} than was sent")
    _check_last_version(path.name, checkpoint, run)
    return f"{path.name}: {digest[:16]}"


def _masters(checkpoint: Checkpoint) -> str:
    # Returns the digest of the float32 masters; if each of several ranks has a share, that of their shares.
    masters, ranks = checkpoint.tensors["weights"], checkpoint.trainer.get(RANKS)
    if ranks is None:
        return weights_digest(masters)
    shares = []
    for rank in range(ranks):
        rows = {name: shard_rows(len(tensor), ranks, rank) for name, tensor in masters.items()}
        shares.append({name: tensor[rows[name].start : rows[name].stop] for name, tensor in masters.items()})
    return combine([weights_digest(share) for share in shares])


def _check_last_version(name: str, checkpoint: Checkpoint, run: RunFiles) -> None:
    # Raises Broken unless the last version sent is the masters, or the sampling average, in the network's dtypes.
    version, lora = checkpoint.trainer["version"], checkpoint.trainer["lora"] or {}  # none with tune=full
    prefix = f"{version}/"
    kept = {key.removeprefix(prefix): t for key, t in checkpoint.tensors["retained"].items() if key.startswith(prefix)}
    masters = checkpoint.tensors.get("sampling", checkpoint.tensors["weights"])
    for tensor_name, tensor in kept.items():
        if not torch.equal(tensor, masters[tensor_name].to(tensor.dtype)):
            raise Broken(f"{name}: version {version} is not its masters rounded to {tensor.dtype}, at {tensor_name}")
    layout = Layout.of(kept)
    draft = Draft("policy", version, layout, lora.get("alpha"), lora.get("rank"))
    digest = draft.sealed(layout.digests(layout.packed(kept))).digest
    if {digest} != run.sent.get(("policy", version)):
        raise Broken(f"{name} holds other bytes as version {version} ({digest[:16]}) than were sent")


CHECKS: dict[str, Callable[[RunFiles], str]] = {
    "bound": bound,
    "exactly once": exactly_once,
    "version chain": version_chain,
    "digests": digests,
    "inputs": inputs,
}


def verify(root: Path) -> list[tuple[str, bool, str]]:
    run = RunFiles.read(root)
    rows = []
    for name, check in CHECKS.items():
        try:
            rows.append((name, True, check(run)))
        except (Broken, DamagedCheckpoint) as error:
            rows.append((name, False, str(error)))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="async-flowrl verify",
        description="Checks a finished run from its files alone; the exit code is 0 if all checks hold.",
    )
    parser.add_argument("run_dir", type=Path)
    root = parser.parse_args(arguments).run_dir.expanduser()
    try:
        rows = verify(root)
    except FileNotFoundError as error:
        return refuse(f"{root} is not the folder of a finished run: it has no {error.filename}")
    except (OSError, ValueError, KeyError) as error:
        return refuse(f"{root} cannot be verified: {type(error).__name__}: {error}")
    table = format_table(("check", "holds", "found"), [(name, "yes" if ok else "NO", text) for name, ok, text in rows])
    sys.stdout.write(table + "\n")
    return 0 if all(ok for _, ok, _ in rows) else 1
