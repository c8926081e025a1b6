"""Tests of checkpoints in shares, as far as one process can run them."""

import hashlib
import io
import json
import os
import pickle
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh

from async_flowrl.training.checkpoint import (
    FOLDER,
    RANKS,
    DamagedCheckpoint,
    begin_checkpoint,
    complete,
    described_share,
    end_checkpoint,
    find_checkpoint,
    read_checkpoint,
    verify_checkpoint,
    verify_share,
)
from async_flowrl.training.fsdp import World
from async_flowrl.training.shard_checkpoint import SafeReader, whole_parts, write_shards
from async_flowrl.training.sharded import ShardSaving, host_mesh

PARTS = {"weights/a": torch.arange(6.0).reshape(3, 2), "weights/b.c": torch.ones(2), "retained/4/a": torch.zeros(3, 2)}


def written(directory: Path, step: int = 4) -> Path:
    work = begin_checkpoint(directory, 0)
    save(dict(PARTS), checkpoint_id=str(work / FOLDER), no_dist=True)
    complete(work, {"version": step, RANKS: 2}, {"version": step})
    return end_checkpoint(work, step, keep=2)


@contextmanager
def hashed() -> Iterator[list[str]]:
    """Names of the files that are read to be hashed."""
    names, digest = [], hashlib.file_digest

    def recorded(stream: Any, kind: str) -> Any:
        names.append(Path(stream.name).name)
        return digest(stream, kind)

    with mock.patch("hashlib.file_digest", recorded):
        yield names


SMALL, SHARE = [".metadata", "controller.json", "trainer.json"], "__0_0.distcp"


def test_the_share_of_a_rank_is_hashed_by_that_rank_alone(tmp_path: Path) -> None:
    """When it is written, and when a run goes on from it; whoever reads whole tensors checks all."""
    work = begin_checkpoint(tmp_path, 0)
    save(dict(PARTS), checkpoint_id=str(work / FOLDER), no_dist=True)
    described = described_share(work, 0)
    assert list(described) == [f"{FOLDER}/{SHARE}"] and described_share(work, 1) == {}
    with hashed() as names:
        complete(work, {"version": 4, RANKS: 2}, {"version": 4}, described)
    assert sorted(names) == SMALL
    path = end_checkpoint(work, 4, keep=2)
    written_there = json.loads((path / "manifest.json").read_text())["files"]
    assert written_there[f"{FOLDER}/{SHARE}"] == described[f"{FOLDER}/{SHARE}"] and len(written_there) == 4
    for check, share in (
        (lambda: verify_checkpoint(path, shares=False), []),
        (lambda: find_checkpoint(tmp_path, shares=False), []),
        (lambda: verify_share(path, 1), []),
        (lambda: verify_share(path, 0), [SHARE]),
        (lambda: verify_checkpoint(path), [SHARE]),
        (lambda: read_checkpoint(path), [SHARE]),
    ):
        with hashed() as names:
            check()
        assert sorted(names) == sorted([*SMALL, *share])


def test_a_share_that_is_not_there_as_it_was_written_makes_no_checkpoint(tmp_path: Path) -> None:
    work = begin_checkpoint(tmp_path, 0)
    save(dict(PARTS), checkpoint_id=str(work / FOLDER), no_dist=True)
    described, share = described_share(work, 0), work / FOLDER / SHARE
    data = share.read_bytes()
    share.write_bytes(data[:-1])
    with pytest.raises(OSError, match=rf"it has {len(data) - 1:,} bytes, its writer wrote {len(data):,}.*{SHARE}"):
        complete(work, {}, {}, described)
    share.unlink()
    with pytest.raises(FileNotFoundError, match=SHARE):
        complete(work, {}, {}, described)
    assert find_checkpoint(tmp_path) is None and not (work / "manifest.json").exists()


def test_a_damaged_share_is_found_by_its_rank_and_a_short_one_by_all(tmp_path: Path) -> None:
    path = written(tmp_path)
    share = path / FOLDER / SHARE
    data = bytearray(share.read_bytes())
    share.write_bytes(data[:-1])
    for rank in (0, 1):
        with pytest.raises(DamagedCheckpoint, match="does not have the size and digest"):
            verify_share(path, rank)
    assert find_checkpoint(tmp_path, shares=False) is None
    data[len(data) // 2] ^= 1
    share.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match=f"{FOLDER}/{SHARE} does not have the size and digest"):
        verify_share(path, 0)
    verify_share(path, 1)
    assert find_checkpoint(tmp_path, shares=False) == path and find_checkpoint(tmp_path) is None


@pytest.mark.usefixtures("one_rank")
def test_a_share_is_not_read_before_it_is_verified(tmp_path: Path) -> None:
    path, saving = written(tmp_path), ShardSaving.of(World(0, 1), {"a": (3, 2)})
    with pytest.raises(RuntimeError, match="is read before its shares are verified"):
        saving.read(str(path))
    saving.verify(str(path))
    with pytest.raises(RuntimeError, match="is read before its shares are verified"):
        saving.read(str(path.with_name("step_5")))


@pytest.fixture
def one_rank() -> Iterator[tuple[DeviceMesh, dist.ProcessGroup]]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield host_mesh(World(0, 1)), dist.new_group(backend="gloo")
    dist.destroy_process_group()


@pytest.mark.parametrize("size", [200, 5_000, 6_000_000])
def test_a_disk_that_is_full_in_the_middle_of_a_write_is_named_as_that(
    tmp_path: Path, one_rank: tuple[DeviceMesh, dist.ProcessGroup], size: int
) -> None:
    """Large tensors are not buffered: torch.save finds their place wrong afterwards, and says only that."""
    shapes = dict.fromkeys("ab", (1000, 1000))
    parts = {"weights": {name: torch.ones(shape) for name, shape in shapes.items()}}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with pytest.raises(OSError, match=r"a trainer rank cannot write its share of a checkpoint: .*too large"):
            write_shards(tmp_path / FOLDER, parts, shapes, *one_rank)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    write_shards(tmp_path / FOLDER, parts, shapes, *one_rank)
    whole = whole_parts(tmp_path / FOLDER)["weights"]
    assert torch.equal(whole["b"], torch.ones(1000, 1000))
    for file in (tmp_path / FOLDER).glob("*.distcp"):
        file.unlink()
    assert "b" in whole and "c" not in whole, "which reads no tensor"


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
