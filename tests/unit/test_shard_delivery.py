"""Tests of shares on real processes: a sender or receiver dies within a bucket, and no torn version is used."""

import asyncio
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch

from async_flowrl.controller.endpoints import DELIVERIES
from async_flowrl.controller.sender_errors import SenderLost
from async_flowrl.controller.shard_endpoints import ShardedRolloutEndpoint, ShardedTrainerEndpoint
from checkpoint_engine import Delivery, DeliveryOptions, Header, Layout
from separation.group import WorkerDied, WorkerFailed
from tests.support.process_pool import ProcessPool
from tests.support.share_ends import Death, weights
from tests.support.toy_pool import ListObserver

pytestmark = pytest.mark.serial("ranks")

RANKS, BUCKET = 2, 256
"""Bytes. The first rank's share of a version is thirteen buckets, the second's five."""
SECONDS = 120.0
DeathsAt = Mapping[str, Death]


class Site:
    """Two trainer ranks, two rollout workers, and the delivery between them."""

    def __init__(self, senders: DeathsAt, receivers: DeathsAt) -> None:
        sender = {"ranks": RANKS, "dies_at": senders}
        self.ranks = ProcessPool("trainer", RANKS, "tests.support.share_ends:ShareSender", sender)
        self.workers = ProcessPool("rollout", 2, "tests.support.share_ends:ShareReceiver", {"dies_at": receivers})
        self.replaced: list[tuple[str, str]] = []
        self.headers: dict[int, Header] = {}
        self.delivery: Delivery

    async def start(self) -> None:
        layout: Layout = await self.ranks.workers[0].call("sender.whole_layout")
        sender = ShardedTrainerEndpoint(self.ranks.workers, layout, BUCKET, self.sealed)
        options = DeliveryOptions(deadline=SECONDS, max_fan_out=99, node_fan_out=99)
        self.delivery = Delivery(
            sender,  # type: ignore[arg-type]
            replace=self.replace,
            options=options,
            ahead=sender.send_ahead,
        )
        for worker in self.workers.workers:
            await self.delivery.join(self.end(worker))

    def end(self, worker: Any) -> ShardedRolloutEndpoint:
        return ShardedRolloutEndpoint(worker, ListObserver(), "object_store")

    def sealed(self, header: Header) -> None:
        self.headers[header.version] = header

    async def replace(self, name: str, error: BaseException) -> None:
        self.replaced.append((name, type(error).__name__))
        index = next(worker.index for worker in self.workers.workers if worker.name == name)
        fresh = await self.workers.replace(index)
        assert await self.delivery.join(self.end(fresh), sorted(self.headers))

    async def publish(self, *versions: int) -> None:
        for version in versions:
            await self.delivery.publish(version)
        async with asyncio.timeout(SECONDS):
            await self.delivery.drain()

    async def serves(self, version: int) -> None:
        """Every worker has the whole version, and computes with its bytes."""
        for worker in self.workers.workers:
            digest, live_digest, live = await worker.call("serve", version)
            assert digest == live_digest == self.headers[version].digest
            assert all(torch.equal(live[name], tensor) for name, tensor in weights(version).items())

    async def close(self) -> None:
        await self.delivery.close()
        await self.ranks.close()
        await self.workers.close()


def held(*versions: int) -> tuple[tuple[str, int, str], ...]:
    return tuple(("policy", version, "ring") for version in versions)


async def with_receiver_killed(at: int) -> None:
    site = Site({}, {"rollout-1": Death(1, at)})
    try:
        await site.start()
        await site.publish(0, 1)
        assert site.replaced == [("rollout-1", "WorkerDied")]
        assert [worker.name for worker in site.workers.workers] == ["rollout-0", "rollout-1.1"]
        for worker in site.workers.workers:
            assert await worker.call("held", lane=DELIVERIES) == held(0, 1)
        await site.serves(1)
        await site.serves(0)
        await site.publish(2)
        await site.serves(2)
        assert site.delivery.stats.corrupt == 0
    finally:
        await site.close()


async def with_sender_killed(rank: str, death: Death) -> None:
    site = Site({rank: death}, {})
    try:
        await site.start()
        await site.publish(0)
        with pytest.raises(WorkerDied, match=f"{rank} died") as raised:
            await site.publish(1)
        assert isinstance(raised.value, SenderLost) and raised.value.worker == rank
        assert site.replaced == [], "receivers are not to blame"
        for worker in site.workers.workers:
            assert await worker.call("held", lane=DELIVERIES) == held(0)
        await site.serves(0)
    finally:
        await site.close()


async def with_receiver_late() -> None:
    """rollout-1 gets nothing until its first version, and half of its second, are too old for the ranks to retain."""
    site, gate = Site({}, {}), asyncio.Event()

    class Late(ShardedRolloutEndpoint):
        async def _deliver(self, method: str, *arguments: Any) -> Any:
            if self.name == "rollout-1" and method == "shards.receive" and arguments[0].start > 0:
                await gate.wait()
            return await super()._deliver(method, *arguments)

    with mock.patch.object(Site, "end", lambda site, worker: Late(worker, ListObserver(), "object_store")):
        try:
            await site.start()
            acknowledged: list[tuple[str, int]] = []
            site.delivery.on_ack(lambda name, ack: acknowledged.append((name, ack.version)))
            for version in range(4):
                await site.delivery.publish(version)
                async with asyncio.timeout(SECONDS):
                    while ("rollout-0", version) not in acknowledged:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
            gate.set()
            async with asyncio.timeout(SECONDS):
                await site.delivery.drain()
            assert site.replaced == [] and site.delivery.stats.corrupt == 0
            assert [version for name, version in acknowledged if name == "rollout-1"] == [2, 3]
            for worker in site.workers.workers:
                assert await worker.call("held", lane=DELIVERIES) == held(2, 3)
            await site.serves(3)
        finally:
            await site.close()


def test_a_receiver_that_is_too_late_for_a_version_goes_on_with_those_that_are_retained() -> None:
    asyncio.run(with_receiver_late())


async def with_a_version_gone_that_is_needed() -> None:
    site = Site({}, {})
    try:
        await site.start()
        await site.publish(0)
        for worker in site.ranks.workers:
            await worker.call("policy.clear")
        await site.workers.replace(1)
        with pytest.raises(WorkerFailed, match="version 0 of stream policy is neither staged nor retained"):
            await site.delivery.join(site.end(site.workers.workers[1]), [0])
    finally:
        await site.close()


def test_a_version_that_the_ranks_lost_though_it_is_needed_ends_the_delivery_by_name() -> None:
    asyncio.run(with_a_version_gone_that_is_needed())


async def with_two_at_once() -> None:
    """As the versions of two streams come, whose deliveries know nothing of each other."""
    site = Site({}, {})
    try:
        await site.start()
        await site.publish(0, 1)
        fresh = await site.workers.replace(1)
        end, sender = site.end(fresh), ShardedTrainerEndpoint(site.ranks.workers, Layout.of(weights(0)), BUCKET, print)
        both = [end.receive(site.headers[version], await sender.payload(version)) for version in (0, 1)]
        async with asyncio.timeout(SECONDS):
            assert [ack.version for ack in await asyncio.gather(*both)] == [0, 1]
        assert await fresh.call("held", lane=DELIVERIES) == held(0, 1)
        await site.serves(1)
    finally:
        await site.close()


def test_versions_of_two_deliveries_come_to_a_receiver_one_after_the_other() -> None:
    asyncio.run(with_two_at_once())


@pytest.mark.parametrize("bucket", [0, 9])
def test_a_receiver_killed_after_half_of_a_bucket_is_replaced_and_gets_all(bucket: int) -> None:
    asyncio.run(with_receiver_killed(bucket))


@pytest.mark.parametrize("on_the_wire", [False, True], ids=["digested", "on the wire"])
@pytest.mark.parametrize(("rank", "bucket"), [("trainer-0", 3), ("trainer-1", 0)])
def test_a_sender_killed_after_half_of_a_bucket_leaves_the_version_before(
    rank: str, bucket: int, on_the_wire: bool
) -> None:
    asyncio.run(with_sender_killed(rank, Death(1, bucket, on_the_wire)))
