"""Tests of the bytes of weights that a plan counts in the object store, against deliveries in virtual time."""

import weakref
from typing import Any
from unittest import mock

import pytest

from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.controller.stored_weights import MAX_KEPT_BUCKETS, weights_in_store
from separation.virtual import run_virtual
from tests.chaos.share_schedules import HORIZON_SECONDS, Schedule, Site
from tests.support.share_ends import ShareSender, weights

VERSION = sum(tensor.nbytes for tensor in weights(0).values())


def config_of(workers: int, bucket: int = 1 << 26, **changes: Any) -> Config:
    config = compose_config("one_step_off", [f"rollout.num_workers={workers}"])
    config.checkpoint_engine.bucket_bytes = bucket
    for key, value in changes.items():
        setattr(getattr(config, key.partition("__")[0]), key.partition("__")[2], value)
    return config


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("late", ["", "slow"])
def test_no_more_buckets_are_held_than_a_plan_counts(workers: int, late: str) -> None:
    """All pieces that anybody still refers to, at any moment of the delivery of some versions."""
    bucket, held, most = 64, [0], [0]
    send = ShareSender.piece

    def counted(self: ShareSender, version: int, start: int, size: int) -> Any:
        header, piece = send(self, version, start, size)
        piece = piece.copy()
        held[0] += piece.nbytes
        most[0] = max(most[0], held[0])
        weakref.finalize(piece, lambda size=piece.nbytes: held.__setitem__(0, held[0] - size))
        return header, piece

    faults = {("rollout-0", "take", 3): ("receiver:take", late)} if late else {}
    schedule = Schedule(0, faults, buckets=bucket, workers=workers)

    async def job() -> str | None:
        site = Site(schedule)
        try:
            await site.publish()
            return site.wrong(finished=True)
        finally:
            await site.delivery.close()

    with mock.patch.object(ShareSender, "piece", counted):
        assert run_virtual(job(), horizon=HORIZON_SECONDS) is None
    counts = weights_in_store(config_of(workers, bucket), VERSION, shares=True)
    of_deliveries = counts * 2 // 4  # without the canary and what is evaluated
    assert of_deliveries // 3 < most[0] <= of_deliveries
    assert bool(schedule.hit) == bool(late)


def test_whole_versions_and_buckets_of_shares_are_counted() -> None:
    whole, large = 4_500_000_000, 41_000_000_000
    kept = (MAX_KEPT_BUCKETS + 8) * (64 << 20)
    assert weights_in_store(config_of(8), whole, shares=False) == 3 * whole
    assert weights_in_store(config_of(8), large, shares=True) == 4 * kept < large / 6
    elastic = config_of(2, rollout__max_workers=8)
    assert weights_in_store(elastic, large, shares=True) == 4 * kept
    assert weights_in_store(config_of(8), 1000, shares=True) == 4 * 1000, "no more than there are bytes"
