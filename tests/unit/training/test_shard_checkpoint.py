"""Checkpoints in shares: what one process can say of them without several ranks."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from async_flowrl.training.checkpoint import (
    RANKS,
    DamagedCheckpoint,
    begin_checkpoint,
    check_ranks,
    end_checkpoint,
    find_checkpoint,
    read_checkpoint,
)
from async_flowrl.training.shard_checkpoint import FOLDER, whole_parts
from async_flowrl.training.shard_reader import SafeReader

PARTS = {"weights/a": torch.arange(6.0).reshape(3, 2), "weights/b.c": torch.ones(2), "retained/4/a": torch.zeros(3, 2)}


def written(directory: Path, step: int = 4) -> Path:
    work = begin_checkpoint(directory, 0)
    save(dict(PARTS), checkpoint_id=str(work / FOLDER), no_dist=True)
    return end_checkpoint(work, step, {"version": step, RANKS: 2}, {"version": step}, keep=2)


def test_whole_tensors_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    found = read_checkpoint(written(tmp_path))
    assert set(found.tensors) == {"weights", "retained"} and list(found.tensors["weights"]) == ["a", "b.c"]
    assert torch.equal(found.tensors["weights"]["a"], PARTS["weights/a"])
    assert torch.equal(found.tensors["retained"]["4/a"], PARTS["retained/4/a"])


def test_a_folder_that_was_not_ended_is_no_checkpoint(tmp_path: Path) -> None:
    """As a kill at any instant leaves it: some ranks' files, or all, and no name that anybody looks for."""
    good = written(tmp_path)
    work = begin_checkpoint(tmp_path, 0)
    save(dict(PARTS), checkpoint_id=str(work / FOLDER), no_dist=True)
    assert find_checkpoint(tmp_path) == good
    written(tmp_path, 5)
    assert not work.exists(), "the next one has removed it"


def test_a_disk_without_room_is_named_before_anything_is_written(tmp_path: Path) -> None:
    good = written(tmp_path)
    with pytest.raises(OSError, match=r"a checkpoint needs 1,152,921,504,606,846,976 bytes, and there are .* left"):
        begin_checkpoint(tmp_path, 1 << 60)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", good.name]


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata"])
def test_a_damaged_share_is_named(tmp_path: Path, file: str) -> None:
    path = written(tmp_path)
    data = bytearray((path / FOLDER / file).read_bytes())
    data[len(data) // 2] ^= 1
    (path / FOLDER / file).write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=f"{FOLDER}/{file} does not have the size and digest"):
        read_checkpoint(path)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


@pytest.mark.parametrize("what", [Evil(), io.BytesIO(b""), {"a": 1}], ids=["a call", "another class", "no metadata"])
def test_metadata_runs_no_code(tmp_path: Path, what: object) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(what))
    with pytest.raises(ValueError, match=r"which torch does not put there|the metadata is a dict"):
        SafeReader(str(tmp_path)).read_metadata()
    with pytest.raises(ValueError, match="metadata"):
        whole_parts(tmp_path)


def test_another_number_of_ranks_is_refused_by_name() -> None:
    path = Path("run/checkpoints/step_4")
    check_ranks(path, {RANKS: 2}, 2)
    check_ranks(path, {}, None)
    with pytest.raises(ValueError, match=r"by 2 ranks with a share each, .* trainer.shard=full and 3 ranks"):
        check_ranks(path, {RANKS: 2}, 3)
    with pytest.raises(ValueError, match=r"set trainer.shard=full and trainer.num_workers=2"):
        check_ranks(path, {RANKS: 2}, None)
    with pytest.raises(ValueError, match=r"all of the weights each, .*set trainer.shard=none"):
        check_ranks(path, {}, 2)
