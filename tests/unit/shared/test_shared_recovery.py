"""Tests of whole runs of `placement=shared`: if a process dies, all are started again with the state that was kept."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.toy_pool import Fault, ListObserver, Timing, World, once
from tests.support.toy_recovery import (
    Disturb,
    events,
    logged,
    rollbacks,
    run_controller,
    summary,
)
from tests.support.toy_shared import shared_config, shared_toys
from tests.unit.shared.shared_runs import first

SHAKEN = Timing(seed=3, spread=0.8, update=0.3)


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


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of one process."""
    with shared_toys():
        return ran(tmp_path_factory.mktemp("calm") / "run", 1)


PLACES = ("generate", "train", "add_up", "take_step", "stage", "keep_local", "kept_state", "save")


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("workers", "faults"),
    [
        *((2, [first("shared-0", place, "kill", after=1)]) for place in PLACES),
        *((3, [first("shared-1", place, "kill", after=1)]) for place in PLACES[:4]),
        (1, [once("shared-0", "generate", 14, "kill")]),
        (1, [once("shared-0", "add_up", 4, "kill")]),
        (1, [once("shared-0", "save", 2, "kill")]),
        (2, [once("shared-0", "generate", 9, "hang")]),
        (3, [once("shared-1", "keep_local", 2, "hang")]),
        (2, [once("shared-0", "add_up", 4, "kill"), once("shared-0.1", "take_step", 1, "kill")]),
        (3, [once("shared-0", "take_step", 4, "kill"), once("shared-2", "train", 3, "kill")]),
        (2, [once("shared-0", "take_step", 4, "kill"), once("shared-1", "take_step", 4, "kill")]),
        (3, [once("shared-1", "generate", 3, "kill"), once("shared-1.1", "load", 2, "kill")]),
        (2, [once("shared-1", "generate", 6, "kill"), once("shared-0.1", "take_over", 1, "kill")]),
    ],
)
def test_the_weights_are_the_same_whoever_dies(tmp_path: Path, calm: Path, workers: int, faults: list[Fault]) -> None:
    found = ran(tmp_path / "found", workers, *faults)
    assert summary(found)["weights_digest"] == summary(calm)["weights_digest"]
    assert logged(found) == logged(calm)
    assert rollbacks(found) and len(events(found, "fault")) >= len(faults)


def test_at_most_the_step_under_way_and_the_one_whose_state_was_not_kept_are_trained_again(tmp_path: Path) -> None:
    """A death at the end of each step: every attempt begins at one of the two newest versions."""
    for number in range(1, 7):
        root = ran(tmp_path / f"run{number}", 2, once("shared-1", "take_step", number, "kill"))
        assert rollbacks(root) in ([number - 1], [max(0, number - 2)])
