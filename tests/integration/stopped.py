"""Runs that SIGTERM has stopped, with what a test may ask of them: files, words, exit code, processes left."""

import signal
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from async_flowrl.training.checkpoint import find_checkpoint
from separation.processes import alive, descendants
from tests.integration.forked_run import ForkedRun
from tests.integration.runs import Run, lines, wait_until

SLOWLY = ("save.every=1", "disturb.update=0.3", "disturb.constant=true")
LONG = "total_steps=500"
"""Two and a half minutes at least with `SLOWLY`: such a run does not end by itself while a test looks at it."""
SOON = 120.0
"""Seconds, for a machine that is busy with other things; a quiet one needs about three."""
HALVES = "ticket_size=2"
"""Two tickets per group, so that each of two processes has some of every group."""


@dataclass(frozen=True)
class StoppedRun:
    """What is left of a run that was stopped."""

    run: Run
    code: int | None
    out: str
    err: str
    gone: bool
    """Whether everything that the run had started has ended."""


def stopped_on_ray(folder: Path) -> StoppedRun:
    """A run on a Ray cluster of its own, whose two processes sample and train, ended by SIGTERM in its third step.

    Its driver and its workers are forked: as people start it, a run on Ray is `full_run` (conftest.py).
    """
    pools = ("placement=shared", "trainer.num_workers=2", "rollout.num_workers=2", HALVES)
    process = ForkedRun(folder, "one_step_off", LONG, *SLOWLY, "save.every=0", *pools, backend="ray")
    try:
        wait_until(process, lambda: len(lines(folder / "metrics.jsonl")) >= 2, "its second step")
        everything = [*descendants(process.pid), *workers(Run(folder))]
        assert len(everything) >= 4, "two workers and the daemons of their cluster"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate()
    finally:
        process.kill()
    return StoppedRun(Run(folder), process.poll(), out, err, ended(everything))


def workers(run: Run) -> list[psutil.Process]:
    """The processes of its workers, which are no descendants of the run where they are forked (forked_workers.py)."""
    return [psutil.Process(event["pid"]) for event in run.events if event["event"] == "worker"]


def ended(processes: list[psutil.Process]) -> bool:
    """Whether all of them have ended, within SOON."""
    deadline = time.monotonic() + SOON
    while any(alive(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(alive(process) for process in processes)


def quiet(err: str) -> bool:
    """Nothing was said but, on a busy machine, of processes that had to be killed since they took their time to end."""
    return all("which outlived its cluster" in line for line in err.splitlines())


def check_stopped(run: Run) -> int:
    """A stopped run has a checkpoint of exactly where it ended, and a summary of how far it came."""
    done = len(run.metrics)
    assert 1 <= done < 500
    assert run.summary["steps"] == done
    newest = find_checkpoint(run.root / "checkpoints")
    assert newest is not None and newest.name == f"step_{done}"
    assert (run.root / "lora/pytorch_lora_weights.safetensors").exists()
    return done
