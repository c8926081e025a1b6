"""Tests of overlap: generation and training run at the same time, and each second is booked for its own stage."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.run import job
from async_flowrl.training import forward_passes
from async_flowrl.training.update import Update
from benchmarks import disturbed
from tests.integration.gates import steps_recorded, updates_beside_generation
from tests.integration.runs import Run, train

PATIENT = tuple(f"deadlines.{call}=inf" for call in ("generate", "score", "publish", "update", "stall"))
"""Settings of a run on this clock: to it, a call takes as long as all delays meanwhile."""


@contextmanager
def leaping_clock(*, generate: float = 0.0, update: float = 0.0) -> Iterator[None]:
    """All that reads the time, the event loop included, reads it with the delays (benchmarks/disturbed.py) until then.

    `generate` is the seconds that denoising a ticket takes by this clock, and `update` those of an optimizer step; a
    delay comes after that work and is no part of its span.
    """
    real_time, real_monotonic = time.time, time.monotonic
    lock, leapt = threading.Lock(), 0.0

    def leap(seconds: float) -> None:
        nonlocal leapt
        with lock:
            leapt += seconds

    def wall() -> float:
        return real_time() + leapt

    def monotonic() -> float:
        return real_monotonic() + leapt

    denoise, step_from = DiffusersEngine.denoise, Update.step_from

    def denoising(*call: Any) -> Any:
        result = denoise(*call)
        leap(generate)
        return result

    def stepping(*call: Any) -> Any:
        result = step_from(*call)
        leap(update)
        return result

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(DiffusersEngine, "denoise", denoising))
        stack.enter_context(mock.patch.object(Update, "step_from", stepping))
        stack.enter_context(mock.patch.object(time, "time", wall))
        stack.enter_context(mock.patch.object(forward_passes, "time", wall))
        stack.enter_context(mock.patch.object(time, "monotonic", monotonic))
        stack.enter_context(mock.patch.object(disturbed, "time", SimpleNamespace(sleep=leap)))
        defaults = job.open_ledgers.__kwdefaults__
        assert defaults is not None
        stack.enter_context(mock.patch.dict(defaults, {"clock": monotonic}))
        yield


DELAY = 1000.0
"""Seconds of the leaping clock; nothing in the tiny model takes as long, whatever else the machine does."""
pytestmark = pytest.mark.serial("runs")


def test_one_step_off_overlaps_generation_and_training(tmp_path: Path) -> None:
    """All of what could overlap does, and one_step_off lets it: a run in which updates had to wait for generation would
    end with an error. In sync nothing overlaps."""
    steps = 8
    settings = [*PATIENT, f"total_steps={steps}"]
    with leaping_clock(generate=DELAY, update=DELAY):
        with updates_beside_generation(steps, groups=2):
            overlapped = train(tmp_path / "one_step_off", "one_step_off", *settings).summary
        with steps_recorded():
            in_turn = train(tmp_path / "sync", "sync", *settings).summary
    # Of three delays per step two are those of its tickets; one is the update's, for which the second ticket waits.
    assert overlapped["bound"]["generation"] == pytest.approx(3 * DELAY, rel=0.05)
    assert overlapped["bound"]["update"] == pytest.approx(DELAY, rel=0.05)
    assert overlapped["overlap"]["share"] > 0.95 and overlapped["efficiency"] > 0.95
    assert in_turn["bound"]["generation"] == pytest.approx(2 * DELAY, rel=0.05)
    assert in_turn["overlap"]["share"] < 0.02
    assert in_turn["efficiency"] == pytest.approx(2 / 3, rel=0.05)


def seconds(run: Run) -> dict[str, list[float]]:
    """What every call of each stage took, from the run's own records."""
    tickets: dict[int, dict[str, float]] = {}
    versions: dict[int, dict[str, float]] = {}
    for event in run.events:
        if event["event"] == "ticket" and event["kind"] == "train":
            tickets.setdefault(event["ordinal"], {})[event["state"]] = event["time"]
        elif event["event"] == "version" and event["version"] > 0:
            versions.setdefault(event["version"], {})[event["state"]] = event["time"]
    return {
        "generate": [t["SCORING"] - t["RUNNING"] for t in tickets.values()],
        "score": [t["READY"] - t["SCORING"] for t in tickets.values()],
        "update": run.column("timing/update"),
        "publish": [v["acknowledged"] - v["staged"] for v in versions.values()],
    }


@pytest.mark.extended
def test_a_delay_moves_the_seconds_of_its_stage_and_of_no_other(tmp_path: Path) -> None:
    """Each stage has a delay of its own, so that one booked elsewhere, or twice, would show there."""
    delays = {stage: number * DELAY for number, stage in enumerate(("generate", "score", "update", "publish"), 1)}
    settings = ["disturb.constant=true", *(f"disturb.{stage}={delay}" for stage, delay in delays.items())]
    with leaping_clock():
        run = train(tmp_path, "sync", "total_steps=2", "prompts_per_step=1", *PATIENT, *settings)
    taken = seconds(run)
    for stage, delay in delays.items():
        assert taken[stage] and all(delay <= each < delay + 0.5 * DELAY for each in taken[stage]), (stage, taken)
