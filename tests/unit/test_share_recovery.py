"""Tests of runs whose trainer ranks have a share of the weights each: a death takes all ranks back to a checkpoint.

In virtual time, with toy ranks and real checkpoints; tests/integration/test_full_shard_runs.py kills real processes.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from async_flowrl.cli.verify import verify
from async_flowrl.config.check import ConfigError
from async_flowrl.training.checkpoint import HELD, DamagedCheckpoint, read_checkpoint, written
from tests.chaos.share_recovery_schedules import IN_SHARES, undisturbed
from tests.support.toy_pool import Fault, no_fault
from tests.support.toy_recovery import (
    Disturb,
    Groups,
    Outside,
    evaluations,
    kill_after,
    logged,
    rollbacks,
    summary,
    toy_ranks_meet,
)
from tests.support.toy_shares import spoil_share
from tests.unit import recovery_runs

Call = tuple[str, str, int]
"""A worker's name, a method, and the number of the call."""
LATE: Call = ("trainer-0", "take_step", 6)
"""A call in the last step, when checkpoints 2 and 4 are there."""


def go(root: Path, fault: Fault = no_fault, *, disturb: Disturb | None = None, **changes: Any) -> Path | None:
    settings = {"save__keep": 3, **IN_SHARES, **changes}
    with toy_ranks_meet():
        return recovery_runs.go(root, fault, disturb=disturb, **settings)


def killing(*calls: Call) -> Fault:
    return lambda *call: "kill" if call in calls else None


def check_equal(root: Path) -> None:
    """Weights, logged rewards and trained tickets are those of the undisturbed run."""
    assert summary(root)["weights_digest"] == undisturbed(1).digest
    assert logged(root) == undisturbed(1).lines
    assert [row for row in verify(root) if not row[1]] == []


def test_toy_ranks_with_shares_train_what_one_rank_trains(tmp_path: Path) -> None:
    """What the tests here compare with is no invention of the toys: the exact sum makes it independent of the ranks."""
    one = {"tune": "lora", "trainer__num_workers": 1, "trainer__shard": "none", "evaluate__every": 1}
    assert go(tmp_path / "one", **one) is None
    assert go(tmp_path / "two", evaluate__every=1) is None
    ours, theirs = (read_checkpoint(tmp_path / run / "checkpoints" / "step_6").tensors for run in ("two", "one"))
    theirs.pop(HELD, None)  # Versions of a LoRA that evaluations may still ask for.
    assert {part: set(tensors) for part, tensors in ours.items()} == {part: set(t) for part, t in theirs.items()}
    assert all(torch.equal(ours[part][name], theirs[part][name]) for part in ours for name in ours[part])
    assert logged(tmp_path / "two") == logged(tmp_path / "one") == undisturbed(1).lines
    assert evaluations(tmp_path / "two") == evaluations(tmp_path / "one")
    files = {file.name for file in (tmp_path / "two" / "checkpoints" / "step_6" / "shards").iterdir()}
    assert files == {"rank_0.pt", "rank_1.pt"}


def damaging(root: Path, rank: int, how: str, *steps: int) -> Disturb:
    """Damages a rank's share of each of these checkpoints as soon as the last one is there."""

    async def disturb(outside: Outside, groups: Groups) -> None:
        while not (root / "checkpoints" / f"step_{steps[-1]}").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        for step in steps:
            spoil_share(root / "checkpoints" / f"step_{step}", rank, how)

    return disturb


@pytest.mark.parametrize(("rank", "how"), [(0, "flip"), (1, "flip"), (1, "remove")])
def test_a_damaged_share_is_passed_over(rank: int, how: str, tmp_path: Path) -> None:
    """A flipped bit is seen by its rank alone, a short or missing file by the controller."""
    root = tmp_path / "run"
    assert go(root, killing(LATE), disturb=damaging(root, rank, how, 4)) is None
    assert rollbacks(root) == [2]
    check_equal(root)


def test_nothing_but_damaged_shares_ends_the_run_by_name(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with pytest.raises(DamagedCheckpoint, match="holds no sound checkpoint to go on from"):
        go(root, killing(LATE), disturb=damaging(root, 1, "flip", 0, 2, 4))
    left = go(tmp_path / "another", disturb=kill_after(20.0))
    assert left is not None
    *newer, oldest = written(left / "checkpoints")
    for checkpoint in newer:
        spoil_share(checkpoint, 0)
    with pytest.raises(ConfigError, match=f"try resume={oldest}$"):
        go(tmp_path / "from_a_damaged_one", resume=str(newer[0]))
    spoil_share(oldest, 0)
    with pytest.raises(ConfigError, match="holds no sound checkpoint to go on from"):
        go(left)
