"""Short real runs for the integration tests, and access to the files that such a run writes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from async_flowrl import main
from async_flowrl.config.compose import compose_config
from benchmarks.disturbed import split, workers
from tests.integration.gates import first_ticket_last

ROOT = Path(__file__).parents[2]
TINY = (
    "model.tiny.layers=1",
    "rollout.num_inference_steps=3",
    "total_steps=5",
    "group_size=4",
    "trainer.micro_batch_size=4",
    "evaluate.every=0",
    "evaluate.before_training=false",
    "evaluate.images_per_prompt=2",
    "console=lines",
    "monitor.report=false",
)
LOCAL = (*TINY, "runtime.backend=local")
WHOLE = ("model.tiny.layers=2", "rollout.num_inference_steps=6")
"""The tiny model and its steps as they are without settings, for runs that have to learn something."""
TRAINED = (*WHOLE, "total_steps=6", "trainer.learning_rate=0.03")
"""What decides about the weights of `full_run` (conftest.py)."""
RECORDED = (
    "evaluate.before_training=true",
    "evaluate.every=4",
    "save.every=4",
    "monitor.report=true",
    "monitor.tensorboard=true",
    "monitor.wandb=true",
)
"""Everything that a run can record, at steps of which the last is none by its number."""
DELAYS = tuple(f"disturb.{stage}=0.3" for stage in ("generate", "score", "update", "publish"))
GLOO = (
    "checkpoint_engine.transport=gloo",
    "checkpoint_engine.ready_seconds=300",
    "checkpoint_engine.setup_seconds=300",
    "deadlines.publish=900",
)
"""Weights go by gloo, also on a busy machine, where a handshake takes longer than the 10 seconds after which a version
goes another way."""
LIMIT = 300.0
"""Seconds any one run may take."""


@dataclass(frozen=True)
class Run:
    """A run directory, read."""

    root: Path

    @cached_property
    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.root / "summary.json").read_text()))

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return lines(self.root / "metrics.jsonl")

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        return lines(self.root / "events.jsonl")

    @property
    def digest(self) -> str:
        return str(self.summary["weights_digest"])

    @property
    def digests(self) -> list[str]:
        """Of every published version, in order."""
        sent = [e for e in self.events if e["event"] == "version" and e["state"] == "sent" and e["stream"] == "policy"]
        return [e["digest"] for e in sorted(sent, key=lambda e: int(e["version"]))]

    def tickets(self, state: str, kind: str = "train") -> list[dict[str, Any]]:
        """Transitions into `state`, as they happened."""
        return [e for e in self.events if e["event"] == "ticket" and e["state"] == state and e["kind"] == kind]

    @property
    def sample_log(self) -> tuple[list[tuple[Any, ...]], list[Any]]:
        """What was trained, ticket by ticket with the weights it was made with, and the reward of every step."""
        trained = [(e["ordinal"], e["step"], e["version"], e["digest"]) for e in self.tickets("TRAINED")]
        return trained, self.column("reward/mean")

    def column(self, key: str) -> list[Any]:
        return [line[key] for line in self.metrics]


def train(folder: Path, mode: str, *overrides: str, code: int = 0) -> Run:
    """A run with its workers as threads of this process."""
    disturbance, settings = split(overrides)
    config = compose_config(mode, [*LOCAL, f"output_dir={folder}", *settings])
    assert main.train(config, dict, workers(disturbance)) == code
    return Run(folder)


def in_every_way(folder: Path, mode: str, *overrides: str, steps: int, first: int) -> Run:
    """A run of two pools, which has the weights of one process that does both, and of a run in two parts."""
    whole = train(folder / "whole", mode, *overrides, f"total_steps={steps}")
    shared = train(folder / "shared", mode, *overrides, f"total_steps={steps}", "placement=shared")
    train(folder / "parts", mode, *overrides, f"total_steps={first}")
    resumed = train(folder / "parts", mode, *overrides, f"total_steps={steps}", "resume=auto")
    assert whole.digest == shared.digest == resumed.digest
    assert whole.digests == shared.digests and len(set(whole.digests)) == steps + 1
    return whole


def train_here_on_ray(folder: Path, mode: str, *overrides: str) -> Run:
    """A run on the Ray cluster that this process is connected to (fixture `ray_here`)."""
    return train(folder, mode, "runtime.backend=ray", *overrides)


def overtaking(folder: Path, mode: str, *overrides: str) -> Run:
    """A run of two rollout workers, in each step of which a later ticket was accepted before the first."""
    with first_ticket_last():
        run = train(folder, mode, "rollout.num_workers=2", *overrides)
    check_overtaken(run)
    return run


def check_overtaken(run: Run) -> None:
    """The gate `first_ticket_last` was there, and both workers made tickets."""
    made = run.tickets("SCORING")
    assert {event["worker"] for event in made} == {"rollout-0", "rollout-1"}
    for step in {event["step"] for event in made}:
        first = min(event["ordinal"] for event in made if event["step"] == step)
        accepted = [event["ordinal"] for event in made]
        assert max(accepted[: accepted.index(first)], default=-1) > first, f"in step {step} nothing came before it"


def start(folder: Path, mode: str, *overrides: str, program: str = "benchmarks.disturbed") -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", program, "--config-name", mode, *TINY, f"output_dir={folder}"]
    return subprocess.Popen(
        [*command, *overrides],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: "subprocess.Popen[str]", code: int) -> tuple[str, str]:
    """What it wrote, once it has ended with exit code `code`; nothing of it is left running."""
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == code, (process.returncode, err[-3000:])
    return out, err


class Process(Protocol):
    """A run as a process: `subprocess.Popen` or ForkedRun (forked_run.py)."""

    def poll(self) -> int | None: ...

    def communicate(self) -> tuple[str, str]: ...


def wait_until(process: Process, condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert process.poll() is None, f"it ended before {what}: {process.communicate()[1][-3000:]}"
        assert time.monotonic() < deadline, f"{LIMIT:g} s passed before {what}"
        time.sleep(0.05)


def exit_code(program: Callable[[], int]) -> int:
    """What a program ends with that is called in this process; its words are in `sys.argv`."""
    try:
        return program()
    except SystemExit as end:
        return int(end.code or 0)


def lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file of JSON objects."""
    text = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in text if line.endswith("\n")]
