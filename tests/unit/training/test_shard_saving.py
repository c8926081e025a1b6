"""Tests of checkpoints in shares by two real ranks, one of which cannot write for a while."""

import asyncio
from pathlib import Path

import pytest
import torch

from async_flowrl.controller.rank_weights import DISK_ERRORS, ShardedWeights
from async_flowrl.policies.registry import resolve_model
from async_flowrl.training.checkpoint import find_checkpoint, read_checkpoint
from separation.group import WorkerFailed
from separation.rendezvous import join_process_group
from separation.supervise import together
from tests.support.process_pool import ProcessPool
from tests.unit.training.test_full_shards import full_config

pytestmark = pytest.mark.serial("runs")

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


def test_a_share_for_which_the_disk_is_full_costs_that_checkpoint_and_no_memory(tmp_path: Path) -> None:
    """First the disk of rank 0 is full, then that of rank 1, of the same two processes."""
    asyncio.run(on_full_disks(tmp_path))
