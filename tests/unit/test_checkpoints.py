"""Tests of a run's checkpoints: written beside training, insisted on, and passed over where they are damaged."""

import asyncio
import logging
from pathlib import Path

import pytest

from async_flowrl.config.check import ConfigError
from async_flowrl.config.schema import LimitsConfig
from async_flowrl.controller.checkpoints import SaveFailed
from async_flowrl.training.checkpoint import DamagedCheckpoint, written
from tests.support.toy_pool import Timing
from tests.support.toy_recovery import Groups, Outside, at, events, kill_after, rollbacks
from tests.unit.recovery_runs import check_equal, go


@pytest.mark.extended
def test_checkpoints_are_written_beside_training(tmp_path: Path) -> None:
    """Each takes longer than a step; the next one waits for it, training does not."""
    lengths = {}
    for name, seconds, every in (("fast", 0.0, 3), ("slow", 9.0, 3), ("late", 30.0, 1)):
        assert go(tmp_path / name, timing=Timing(save=seconds), save__every=every) is None
        lengths[name] = [round(e["ended"] - e["started"], 3) for e in events(tmp_path / name, "step")][1:]
        check_equal(tmp_path / name)
    assert lengths["slow"] == lengths["fast"], "a step waited for a checkpoint"
    assert sum(lengths["late"]) > 4 * 30.0, "two were written at the same time"
    assert [path.name for path in written(tmp_path / "slow" / "checkpoints")] == ["step_6", "step_3"]


def test_a_full_disk_is_loud_and_survived(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "run"
    assert go(root, at(save_2="full", save_3="full")) is None
    loud = [record for record in caplog.records if "could not be written" in record.message]
    assert [record.levelno for record in loud] == [logging.WARNING] * 2
    assert "checkpoint 4 could not be written (2 in a row)" in loud[1].message
    assert "No space left on device" in loud[1].message
    assert [path.name for path in written(root / "checkpoints")] == ["step_6", "step_0"]
    check_equal(root)


@pytest.mark.parametrize("missed", [3, 1])
def test_a_disk_that_stays_full_ends_the_run_by_name(missed: int, tmp_path: Path) -> None:
    full = {f"save_{number}": "full" for number in range(2, 9)}
    changes = {} if missed == 3 else {"limits__missed_checkpoints": missed}
    with pytest.raises(SaveFailed, match=f"^{missed} checkpoints in a row could not be written: .*No space left"):
        go(tmp_path / "run", at(**full), save__every=1, **changes)
    assert [path.name for path in written(tmp_path / "run" / "checkpoints")] == ["step_0"]


@pytest.mark.parametrize("misses", [1, 2, 3])
def test_the_last_checkpoint_is_insisted_on(misses: int, tmp_path: Path) -> None:
    fault = at(**{f"save_{number}": "full" for number in range(4, 4 + misses)})
    if misses == LimitsConfig().missed_checkpoints:
        with pytest.raises(SaveFailed):
            go(tmp_path / "run", fault)
    else:
        assert go(tmp_path / "run", fault) is None
        check_equal(tmp_path / "run")


def spoil(checkpoint: Path) -> None:
    file = checkpoint / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    left = go(tmp_path / "run", at(add_up_5="kill"), disturb=kill_after(28.0))
    assert left is not None
    newest, older = written(left / "checkpoints")
    spoil(newest)
    assert go(left) is None
    assert rollbacks(left)[-1] == int(older.name.removeprefix("step_"))
    assert f"{newest.name}: weights.safetensors" in caplog.text and "trying an older one" in caplog.text
    check_equal(left)


@pytest.mark.extended
def test_a_checkpoint_damaged_while_the_run_goes_on_is_passed_over(tmp_path: Path) -> None:
    root = tmp_path / "run"

    async def damage(outside: Outside, groups: Groups) -> None:
        while not (root / "checkpoints" / "step_4").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        spoil(root / "checkpoints" / "step_4")

    assert go(root, at(add_up_5="kill"), disturb=damage, tune="full") is None
    assert rollbacks(root) == [2]
    check_equal(root)


def test_a_damaged_checkpoint_that_resume_names_is_refused_with_a_sound_one(tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert go(root, save__keep=9) is None
    newest, older = written(root / "checkpoints")[:2]
    spoil(newest)
    with pytest.raises(ConfigError, match=f"try resume={older}"):
        go(tmp_path / "from_the_damaged_one", resume=str(newest))
    with pytest.raises(ConfigError, match=f"{root}/checkpoints/step_N"):
        go(tmp_path / "from_the_run", resume=str(root))


def test_nothing_but_damaged_checkpoints_is_refused(tmp_path: Path) -> None:
    left = go(tmp_path / "run", disturb=kill_after(14.0))
    assert left is not None
    for checkpoint in written(left / "checkpoints"):
        spoil(checkpoint)
    lines = (left / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="holds no sound checkpoint to go on from"):
        go(left)
    assert lines == (left / "metrics.jsonl").read_bytes(), "nothing is cut back by a refusal"
    root = tmp_path / "running"

    async def damage_all(outside: Outside, groups: Groups) -> None:
        await asyncio.sleep(14.0)
        for checkpoint in written(root / "checkpoints"):
            spoil(checkpoint)

    with pytest.raises(DamagedCheckpoint, match="holds no sound checkpoint to go on from"):
        go(root, at(add_up_4="kill"), disturb=damage_all, tune="full")
