"""Tests of checkpoints in shares, as far as one process can run them."""

import asyncio
import hashlib
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

from async_flowrl.controller.rank_weights import DISK_ERRORS, ShardedWeights
from async_flowrl.policies.registry import resolve_model
from async_flowrl.training.checkpoint import (
    FOLDER,
    RANKS,
    DamagedCheckpoint,
    begin_checkpoint,
    complete,
    end_checkpoint,
    find_checkpoint,
    read_checkpoint,
    verify_checkpoint,
    verify_share,
    whole_parts,
    write_share,
)
from async_flowrl.training.parts import World
from async_flowrl.training.sharded import ShardSaving
from separation.group import WorkerFailed
from separation.rendezvous import join_process_group
from separation.supervise import together
from tests.support.process_pool import ProcessPool
from tests.unit.training.test_full_shards import full_config

PARTS = {
    "weights": {"a": torch.arange(6.0).reshape(3, 2), "b.c": torch.ones(2)},
    "retained": {"4/a": torch.zeros(3, 2)},
    "algorithm": {"count": torch.tensor(3)},
}
NOTHING = {part: {name: tensor[:0] for name, tensor in PARTS[part].items()} for part in ("weights", "retained")}
NOTHING["algorithm"] = PARTS["algorithm"]


def written(directory: Path, step: int = 4) -> Path:
    work = begin_checkpoint(directory, 0)
    described = write_share(work, 0, PARTS) | write_share(work, 1, NOTHING)
    complete(work, {"version": step, RANKS: 2}, {"version": step}, described)
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


SMALL, SHARE = ["controller.json", "trainer.json"], "rank_0.pt"


def test_the_share_of_a_rank_is_hashed_by_that_rank_alone(tmp_path: Path) -> None:
    """When it is written, and when a run goes on from it; whoever reads whole tensors checks all."""
    work = begin_checkpoint(tmp_path, 0)
    described = write_share(work, 0, PARTS)
    assert list(described) == [f"{FOLDER}/{SHARE}"]
    with hashed() as names:
        complete(work, {"version": 4, RANKS: 1}, {"version": 4}, described)
    assert sorted(names) == SMALL
    path = end_checkpoint(work, 4, keep=2)
    written_there = json.loads((path / "manifest.json").read_text())["files"]
    assert written_there[f"{FOLDER}/{SHARE}"] == described[f"{FOLDER}/{SHARE}"] and len(written_there) == 3
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
    described, share = write_share(work, 0, PARTS), work / FOLDER / SHARE
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


def test_a_share_is_not_read_before_it_is_verified(tmp_path: Path) -> None:
    path, saving = written(tmp_path), ShardSaving(World(1, 2))
    with pytest.raises(RuntimeError, match="is read before its shares are verified"):
        saving.read(str(path))
    saving.verify(str(path))
    with pytest.raises(RuntimeError, match="is read before its shares are verified"):
        saving.read(str(path.with_name("step_5")))
    assert saving.read(str(path)).tensors["retained"]["4/a"].shape == (0, 2)


def test_whole_tensors_are_the_rows_of_all_ranks(tmp_path: Path) -> None:
    parts = read_checkpoint(written(tmp_path)).tensors
    assert {part: [*tensors] for part, tensors in parts.items()} == {part: [*of] for part, of in PARTS.items()}
    assert all(torch.equal(parts[part][name], tensor) for part, of in PARTS.items() for name, tensor in of.items())


@pytest.mark.parametrize("size", [200, 5_000, 3_000_000])
def test_a_disk_that_is_full_in_the_middle_of_a_write_is_named_as_that(tmp_path: Path, size: int) -> None:
    """Large tensors are not buffered: torch.save finds their place wrong afterwards, and says only that."""
    parts = {"weights": {name: torch.ones(1000, 1000) for name in "ab"}}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with pytest.raises(OSError, match=r"a trainer rank cannot write its share of a checkpoint: .*too large"):
            write_share(tmp_path, 0, parts)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    write_share(tmp_path, 0, parts)
    whole = whole_parts(tmp_path, 1)["weights"]
    assert torch.equal(whole["b"], torch.ones(1000, 1000))
    assert "b" in whole and "c" not in whole


def test_a_folder_that_a_rank_does_not_see_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="output_dir must be one that all trainer ranks share"):
        write_share(tmp_path / "elsewhere", 0, PARTS)


def test_a_share_runs_no_code(tmp_path: Path) -> None:
    write_share(tmp_path, 0, PARTS)
    torch.save({"weights": Evil()}, tmp_path / FOLDER / SHARE)
    with pytest.raises(pickle.UnpicklingError):
        whole_parts(tmp_path, 1)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("true",)


FULL = 20_000
"""Bytes of a file after which the disk of one rank is full; its share is larger."""


async def on_full_disks(folder: Path) -> None:
    config = full_config(num_workers=2)
    arguments = {"config": config, "model": resolve_model(config.model)}
    pool = ProcessPool("trainer", 2, "tests.support.limited_trainer:LimitedTrainer", arguments)
    try:
        await join_process_group(pool, timeout=300)
        await together(*(rank.call("load") for rank in pool.workers))
        for refused in (0, 1):
            await on_a_full_disk(pool, refused, folder / f"full for rank {refused}")
    finally:
        await pool.close()


async def on_a_full_disk(pool: ProcessPool, refused: int, directory: Path) -> None:
    ranks, weights = pool.workers, ShardedWeights(pool)

    async def write() -> None:
        await weights.snapshot()
        await weights.save(0, str(directory), {"version": 0}, 2, ())

    await ranks[refused].call("limit", FULL)
    with pytest.raises(WorkerFailed, match="a trainer rank cannot write its share of a checkpoint") as raised:
        await write()
    assert raised.value.kind in DISK_ERRORS, "a checkpoint that is missed, not the end of the run"
    assert find_checkpoint(directory) is None
    assert await together(*(rank.call("has_copy") for rank in ranks)) == [False, False]
    await ranks[refused].call("limit", -1)
    await write()
    assert await together(*(rank.call("has_copy") for rank in ranks)) == [False, False]
    found = find_checkpoint(directory)
    assert found is not None
    digests = await together(*(rank.call("parameters.fingerprint") for rank in ranks))
    await together(*(rank.call("saving.verify", str(found)) for rank in ranks))
    assert await together(*(rank.call("restore", str(found)) for rank in ranks)) == [0, 0]
    assert await together(*(rank.call("parameters.fingerprint") for rank in ranks)) == digests
    assert all(torch.isfinite(tensor).all() for tensor in read_checkpoint(found).tensors["weights"].values())


@pytest.mark.serial("runs")
def test_a_share_for_which_the_disk_is_full_costs_that_checkpoint_and_no_memory(tmp_path: Path) -> None:
    """First the disk of rank 0 is full, then that of rank 1, of the same two processes."""
    asyncio.run(on_full_disks(tmp_path))
