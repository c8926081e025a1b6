"""Tests of whole runs of `placement=shared`: if the last process dies, the run goes back to its checkpoint."""

import json
from collections.abc import Iterator
from errno import ENOSPC
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from async_flowrl.training.checkpoint_folder import checkpoint_step, written
from separation.group import WorkerFailed
from tests.support.toy_pool import Fault, ListObserver, Timing, World, once
from tests.support.toy_recovery import (
    Disturb,
    Groups,
    Outside,
    evaluations,
    events,
    logged,
    rollbacks,
    run_controller,
    summary,
)
from tests.support.toy_shared import shared_config, shared_toys

SHAKEN = Timing(seed=3, spread=0.8, update=0.3)
IN_STEP = Timing(generate=0.1, update=0.3)
"""Both processes are idle when a step ends, so the first one measures its KL."""


@pytest.fixture(autouse=True)
def _toys() -> Iterator[None]:
    with shared_toys():
        yield


def ran(
    root: Path,
    workers: int,
    *faults: Fault,
    k: int = 1,
    observer: ListObserver | None = None,
    disturb: Disturb | None = None,
    timing: Timing = SHAKEN,
    **changes: Any,
) -> Path:
    """Returns `root`, in which a run or a part of it was made; `disturb` runs beside the controller."""
    config = shared_config(k, workers, hand_over="stream", **{"save__every": 2, "resume": "auto", **changes})
    config.output_dir = str(root)

    def fault(worker: str, method: str, number: int) -> str | None:
        return next((what for one in faults if (what := one(worker, method, number))), None)

    world = World(timing, fault, observer or ListObserver())
    assert run_controller(config, root, world, disturb=disturb) is None
    return root


def line(root: Path, step: int) -> dict[str, Any]:
    return dict(json.loads((root / "metrics.jsonl").read_text().splitlines()[step]))


def saved(root: Path) -> list[int]:
    return sorted(map(checkpoint_step, written(root / "checkpoints")))


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of one process."""
    with shared_toys():
        return ran(tmp_path_factory.mktemp("calm") / "run", 1)


async def stop(outside: Outside, groups: Groups) -> None:
    """Ends a run after its first step."""
    outside.stop.ask("a test")


@pytest.mark.parametrize(
    ("workers", "faults", "goes_back"),
    [
        (1, [once("shared-0", "generate", 14, "kill")], True),
        (1, [once("shared-0", "train_last", 4, "kill")], True),
        (1, [once("shared-0", "save", 2, "kill")], True),
        (2, [once("shared-0", "generate", 9, "hang")], False),
        (2, [once("shared-0", "add_up", 4, "kill"), once("shared-0.1", "take_step", 1, "kill")], False),
        (3, [once("shared-0", "take_step", 4, "kill"), once("shared-2", "train", 3, "kill")], False),
        (2, [once("shared-0", "take_step", 4, "kill"), once("shared-1", "take_step", 4, "kill")], True),
        (3, [once("shared-1", "generate", 3, "kill"), once("shared-1.1", "load", 2, "kill")], False),
    ],
    ids=["sampling", "training", "saving", "hung", "twice", "two", "both", "newcomer"],
)
def test_the_weights_are_the_same_whoever_dies(
    tmp_path: Path, calm: Path, workers: int, faults: list[Fault], goes_back: bool
) -> None:
    found = ran(tmp_path / "found", workers, *faults)
    assert summary(found)["weights_digest"] == summary(calm)["weights_digest"]
    assert logged(found) == logged(calm)
    assert bool(rollbacks(found)) == goes_back
    assert len(events(found, "fault")) >= len(faults)


def test_a_step_before_a_checkpoint_has_its_whole_line_at_once(tmp_path: Path, calm: Path) -> None:
    """So a run that goes on from the checkpoint lacks no number; the KL of any other step is measured after it."""
    root, calls = tmp_path / "run", list[str]()

    def fault(worker: str, method: str, number: int) -> str | None:
        calls.extend([method] if method in ("save", "measure_kl") else [])
        if method == "save" and (root / "metrics.jsonl").read_text():
            assert line(root, 0)["kl_per_update"] > 0.0
        return None

    ran(root, 2, fault, save__every=1)
    assert logged(root) == logged(calm) and "measure_kl" not in calls and len(calls) >= 6
    ran(tmp_path / "other", 2, fault)
    assert logged(tmp_path / "other") == logged(calm) and "measure_kl" in calls


def test_a_run_that_is_stopped_after_a_measured_step_has_the_whole_line_and_goes_on(tmp_path: Path) -> None:
    """The checkpoint comes first: the process may be killed at any moment then."""
    root, checkpoints = tmp_path / "run", list[list[int]]()

    def fault(worker: str, method: str, number: int) -> str | None:
        if method == "measure_kl":
            checkpoints.append(saved(root))
        return None

    with shared_toys():  # A mutant calls this test without its fixtures.
        ran(root, 2, fault, disturb=stop)
        assert checkpoints == [[0, 1]] and summary(root)["steps"] == 1
        assert line(root, 0)["kl_per_update"] > 0.0
        ran(root, 2)
        assert logged(root) == logged(ran(tmp_path / "calm", 1))


@pytest.mark.parametrize(("fault", "error"), [("raise", "WorkerFailed"), ("hang", "DeadlineExceeded")])
def test_a_measurement_that_fails_when_a_run_stops_is_recorded_under_its_own_name(
    tmp_path: Path, fault: str, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "run"
    ran(root, 2, lambda worker, method, number: fault if method == "measure_kl" else None, disturb=stop)
    assert saved(root) == [0, 1] and "kl_per_update" not in line(root, 0)
    assert f"KL of step 0: {error}" in caplog.text


def test_the_last_process_is_not_killed_because_a_measurement_is_late(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One of two dies in the measurement, and the other one takes too long for it: nobody else has the weights."""
    dies, late = once("shared-0", "measure_kl", 1, "kill"), once("shared-1", "measure_kl", 1, "delay")
    short = {"deadlines__generate": 0.5, "deadlines__update": 1.0}
    root = ran(tmp_path / "run", 2, dies, late, disturb=stop, timing=IN_STEP, **short)
    assert "KL of step 0: DeadlineExceeded" in caplog.text and summary(root)["steps"] == 1
    assert "trainer-1" not in {event["worker"] for event in events(root, "fault")}


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_measurement_that_hangs_when_a_run_stops_costs_neither_its_weights_nor_an_evaluation(
    tmp_path: Path, evaluates: bool
) -> None:
    """The process that hangs is the first, which gives the final weights; it is killed, and another one gives them."""
    settings: dict[str, Any] = {"evaluate__every": int(evaluates), "timing": IN_STEP}
    with shared_toys():  # A mutant calls this test without its fixtures.
        ran(calm := tmp_path / "calm", 2, disturb=stop, **settings)
        ran(root := tmp_path / "run", 2, once("shared-0", "measure_kl", 1, "hang"), disturb=stop, **settings)
    assert summary(root) == summary(calm) and summary(root)["steps"] == 1
    assert bool(evaluations(root)) == evaluates and evaluations(root) == evaluations(calm)
    assert {event["worker"] for event in events(root, "fault")} >= {"trainer-0"} and not rollbacks(root)


def test_a_kl_that_cannot_be_written_to_its_line_costs_nothing_else(
    tmp_path: Path, calm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = OSError(ENOSPC, "No space left on device")
    with mock.patch("async_flowrl.observability.metrics.MetricsLog.amend", side_effect=full):
        ran(root := tmp_path / "run", 2)
    assert summary(root) == summary(calm) and "step 0: its KL could not be added to its metrics" in caplog.text
    assert logged(root)[1:] == logged(calm)[1:] and "kl_per_update" not in line(root, 0)


def test_a_measurement_that_fails_while_a_run_goes_on_ends_it_by_name(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="measure_kl"):
        ran(tmp_path / "run", 2, lambda worker, method, number: "raise" if method == "measure_kl" else None)
