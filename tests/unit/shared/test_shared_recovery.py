"""Tests of whole runs of `placement=shared`: if the last process dies, the run goes back to its checkpoint."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.toy_pool import Fault, ListObserver, Timing, World, once
from tests.support.toy_recovery import events, logged, rollbacks, run_controller, summary
from tests.support.toy_shared import shared_config, shared_toys

SHAKEN = Timing(seed=3, spread=0.8, update=0.3)


@pytest.fixture(autouse=True)
def _toys() -> Iterator[None]:
    with shared_toys():
        yield


def ran(root: Path, workers: int, *faults: Fault, k: int = 1) -> Path:
    config = shared_config(k, workers, hand_over="stream", save__every=2)
    config.output_dir = str(root)

    def fault(worker: str, method: str, number: int) -> str | None:
        return next((what for one in faults if (what := one(worker, method, number))), None)

    assert run_controller(config, root, World(SHAKEN, fault, ListObserver())) is None
    return root


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
    tmp_path: Path, workers: int, faults: list[Fault], goes_back: bool
) -> None:
    calm = ran(tmp_path / "calm", 1)
    found = ran(tmp_path / "found", workers, *faults)
    assert summary(found)["weights_digest"] == summary(calm)["weights_digest"]
    assert logged(found) == logged(calm)
    assert bool(rollbacks(found)) == goes_back
    assert len(events(found, "fault")) >= len(faults)
