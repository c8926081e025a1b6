"""Tests in virtual time of bytes that come ahead of a version's digests: how often each is fetched and sent."""

import asyncio

from async_flowrl.controller.shard_endpoints import (
    MAX_BUCKETS_AHEAD,
    MAX_KEPT_BUCKETS,
    ShardedPayload,
    ShardedTrainerEndpoint,
)
from async_flowrl.plan.virtual_time import run_virtual
from checkpoint_engine import Layout
from tests.chaos.share_schedules import HORIZON_SECONDS, RANKS, Schedule, Site
from tests.support.share_ends import weights


def buckets(site: Site) -> int:
    payload = ShardedPayload(site.ranks, "sender.policy.piece", 0, site.schedule.buckets)
    return len(payload.buckets(Layout.of(weights(0))))


def fetched(site: Site) -> int:
    return sum(rank._calls["piece"] for rank in site.ranks)


def test_a_receiver_that_is_late_shares_the_buckets_that_are_kept() -> None:
    schedule = Schedule(0, {("rollout-1", "take", 1): ("receiver:take", "slow")}, buckets=700)

    async def job() -> tuple[int, int]:
        site = Site(schedule)
        try:
            for worker in site.workers:
                await site.delivery.join(site.end(worker))
            await site.delivery.publish(0)
            await site.delivery.drain()
            assert site.wrong(finished=False) is None
            return buckets(site), fetched(site)
        finally:
            await site.delivery.close()

    there, asked = run_virtual(job(), horizon=HORIZON_SECONDS)
    assert MAX_BUCKETS_AHEAD < there <= MAX_KEPT_BUCKETS, "all are kept, and more than one receiver needs"
    assert asked == there and schedule.hit


def test_bytes_that_wait_for_a_delivery_of_another_stream_are_sent_once() -> None:
    async def job() -> tuple[int, int, int]:
        site = Site(Schedule(0, workers=1))
        (worker,) = site.workers
        end = site.end(worker)
        sender = ShardedTrainerEndpoint(site.ranks, Layout.of(weights(0)), site.schedule.buckets, site._sealed)
        await sender.stage(0)
        other = asyncio.create_task(end.receive(await sender.seal(0), await sender.payload(0)))
        await sender.stage(1)
        while worker._calls["take"] < RANKS:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not other.done()
        await sender.send_ahead(1, [end])
        await end.receive(await sender.seal(1), await sender.payload(1))
        await other
        assert [version for _, version, _ in worker.target.held()] == [0, 1]
        return worker._calls["begin"], buckets(site), fetched(site)

    begun, there, asked = run_virtual(job(), horizon=HORIZON_SECONDS)
    assert begun == 2 and asked == 2 * there
