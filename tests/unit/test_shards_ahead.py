"""Tests in virtual time of bytes that come ahead of a version's digests: how often each is fetched and sent."""

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest

from async_flowrl.config.schema import Config
from async_flowrl.controller.canary import Canary
from async_flowrl.controller.sender_errors import SenderFailed, SenderLate, SenderLost
from async_flowrl.controller.shard_endpoints import ShardedTrainerEndpoint
from async_flowrl.controller.share_payload import ShardedPayload
from async_flowrl.controller.stored_weights import MAX_BUCKETS_AHEAD, MAX_KEPT_BUCKETS
from async_flowrl.controller.worker_proof import WorkerProof
from checkpoint_engine import CANARY_VERSION, Layout
from separation.group import Worker
from separation.supervise import together
from separation.virtual import run_virtual
from tests.chaos.share_schedules import DEADLINE, HORIZON_SECONDS, RANKS, Schedule, Site
from tests.support.share_ends import weights
from tests.support.toy_pool import ListObserver


def buckets(site: Site) -> int:
    payload = ShardedPayload(site.ranks, "sender.policy.piece", 0, site.schedule.buckets, DEADLINE)
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
        return worker._calls["first"], buckets(site), fetched(site)

    begun, there, asked = run_virtual(job(), horizon=HORIZON_SECONDS)
    assert begun == 2 and asked == 2 * there


async def delivered(site: Site) -> None:
    await site.delivery.publish(0)
    await site.delivery.drain()


@pytest.mark.parametrize("method", ["stage", "piece"])
def test_a_rank_that_dies_is_lost_as_a_sender_whatever_it_was_asked(method: str) -> None:
    """So a worker that joins meanwhile, and hears of it, is not to blame."""

    async def job() -> Site:
        site = Site(Schedule(0, {("trainer-1", method, 1): (f"rank:{method}", "kill")}))
        try:
            for worker in site.workers:
                await site.delivery.join(site.end(worker))
            with pytest.raises(SenderLost, match="trainer-1 died"):
                await delivered(site)
            return site
        finally:
            await site.delivery.close()

    site = run_virtual(job(), horizon=HORIZON_SECONDS)
    assert site.schedule.hit and site.replaced == 0


@pytest.mark.parametrize("exception", ["RuntimeError", "TimeoutError", "ConnectionError", "TransferCorrupted"])
def test_a_rank_that_raises_any_exception_while_a_receiver_joins_is_named(exception: str) -> None:
    """Also one that would be cured by a resend, or by another receiver, if a receiver had raised it."""

    async def job() -> Site:
        schedule = Schedule(0, exception=exception)
        site = Site(schedule)
        try:
            await delivered(site)
            schedule.faults["trainer-0", "piece", 3] = "rank:piece", "raise"
            with pytest.raises(SenderFailed, match=f"trainer-0.a method raised {exception}: injected"):
                await site.delivery.join(site.end(site.workers[0]), [0])
            return site
        finally:
            await site.delivery.close()

    site = run_virtual(job(), horizon=HORIZON_SECONDS)
    assert site.schedule.hit and site.replaced == 0 and site.delivery.stats.retries == 0


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("raise", r"trainer-1\.a method raised RuntimeError: injected"),
        ("hang", rf"trainer-1 has not answered sender.policy.piece within the deadline of {DEADLINE:g} s"),
        ("kill", "trainer-1 died: killed"),
    ],
)
def test_a_rank_that_fails_in_buckets_that_nobody_waits_for_is_named_once(
    fault: str, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The receiver that they were fetched for has failed itself. Whoever asks for them afterwards gets the error."""

    async def job() -> None:
        schedule = Schedule(0, {("trainer-1", "piece", 1): ("rank:piece", fault)}, exception="RuntimeError")
        site = Site(schedule)
        await site.sender.stage(0)
        payload = await site.sender.payload(0)
        for start in (0, 512):
            payload.fetch(1, start)
        await asyncio.sleep(2 * DEADLINE)
        with pytest.raises((SenderFailed, SenderLate, SenderLost), match=named):
            await payload.bucket(1, 0)
        await site.sender.close()

    run_virtual(job(), horizon=HORIZON_SECONDS)
    (said,) = [record.getMessage() for record in caplog.records if "nobody waits for" in record.getMessage()]
    assert re.search(named, said)


def test_a_failure_that_a_receiver_is_told_is_not_logged_besides(caplog: pytest.LogCaptureFixture) -> None:
    async def job() -> None:
        site = Site(Schedule(0, {("trainer-1", "piece", 1): ("rank:piece", "hang")}))
        await site.sender.stage(0)
        payload = await site.sender.payload(0)
        asked = asyncio.create_task(payload.bucket(1, 0))
        await asyncio.sleep(0)
        payload.fetch(1, 512)
        with pytest.raises(SenderLate, match="trainer-1"):
            await asked
        await asyncio.sleep(DEADLINE)
        await site.sender.close()

    run_virtual(job(), horizon=HORIZON_SECONDS)
    assert not caplog.records


def test_the_canary_s_buckets_are_kept_while_workers_take_it_and_no_longer() -> None:
    async def job() -> list[int]:
        site = Site(Schedule(0, buckets=700))
        await site.sender.stage(CANARY_VERSION)
        header, payload = await site.sender.seal(CANARY_VERSION), await site.sender.payload(CANARY_VERSION)
        sharded: Any = SimpleNamespace(sharded=True)
        attempt: Any = SimpleNamespace(config=Config(), observer=ListObserver())
        proof = WorkerProof(attempt, sharded, "object_store")
        proof.canary = Canary(header, payload, {})
        asked = []

        async def take(worker: Worker) -> None:
            with proof._taken():
                await proof._deliver(worker)

        for workers in (site.workers, [site._receiver(5)]):
            await together(*(take(worker) for worker in workers))
            asked.append(fetched(site))
            assert not payload._buckets
        return [*asked, buckets(site)]

    first, second, there = run_virtual(job(), horizon=HORIZON_SECONDS)
    assert first == there, "workers that take it together share the buckets"
    assert second == 2 * there


@pytest.mark.parametrize("bucket", [1, 4])
def test_a_rank_that_hangs_in_a_bucket_is_named_with_its_deadline_and_no_receiver_is_blamed(bucket: int) -> None:
    async def job() -> tuple[Site, float]:
        site = Site(Schedule(0, {("trainer-1", "piece", bucket): ("rank:piece", "hang")}))
        clock = asyncio.get_running_loop().time
        try:
            for worker in site.workers:
                await site.delivery.join(site.end(worker))
            began = clock()
            await site.delivery.publish(0)
            with pytest.raises(SenderLate, match=r"publish: trainer-1 has not answered .* within the deadline of 20 s"):
                await site.delivery.drain()
            return site, clock() - began
        finally:
            await site.delivery.close()

    site, seconds = run_virtual(job(), horizon=HORIZON_SECONDS)
    assert site.schedule.hit and site.replaced == 0 and site.delivery.stats.retries == 0
    assert DEADLINE <= seconds < DEADLINE + 5


@pytest.mark.parametrize("late", [["trainer-1"], ["trainer-0", "trainer-1"]])
def test_all_ranks_that_have_not_answered_are_named_because_they_may_wait_for_each_other(late: list[str]) -> None:
    """In the canary's probe they do, if their layers are sharded."""

    async def job() -> SenderLate:
        site = Site(Schedule(0, {(rank, "stage", 1): ("rank:stage", "hang") for rank in late}))
        with pytest.raises(SenderLate) as raised:
            await site.sender.stage(0)
        return raised.value

    error = run_virtual(job(), horizon=HORIZON_SECONDS)
    assert list(error.workers) == late
    has = "has" if len(late) == 1 else "have"
    assert str(error) == f"publish: {', '.join(late)} {has} not answered sender.stage within the deadline of 20 s"


def test_a_rank_that_hangs_while_a_receiver_joins_is_named() -> None:
    """Nothing comes ahead of a version that is sealed already: the receiver's own `receive` waits for the rank."""

    async def job() -> Site:
        schedule = Schedule(0)
        site = Site(schedule)
        try:
            await site.delivery.publish(0)
            await site.delivery.drain()
            schedule.faults["trainer-0", "piece", 3] = "rank:piece", "hang"
            await asyncio.sleep(1)
            with pytest.raises(SenderLate, match=r"publish: trainer-0 has not answered .* within the deadline of 20 s"):
                await site.delivery.join(site.end(site.workers[0]), [0])
            return site
        finally:
            await site.delivery.close()

    site = run_virtual(job(), horizon=HORIZON_SECONDS)
    assert site.schedule.hit and site.replaced == 0 and site.delivery.stats.retries == 0


def test_a_receiver_that_always_hangs_is_replaced_after_its_own_deadlines() -> None:
    async def job() -> Site:
        hangs = {("rollout-1", "take", n): ("receiver:take", "hang") for n in range(1, 9)}
        site = Site(Schedule(0, hangs))
        try:
            for worker in site.workers:
                await site.delivery.join(site.end(worker))
            await site.delivery.publish(0)
            async with asyncio.timeout(10 * DEADLINE):
                while not site.replaced:  # noqa: ASYNC110
                    await asyncio.sleep(1)
            site.schedule.faults.clear()
            await site.delivery.drain()
            return site
        finally:
            await site.delivery.close()

    site = run_virtual(job(), horizon=HORIZON_SECONDS)
    assert site.replaced == 1 and all(worker.target.held() for worker in site.workers)


@pytest.mark.parametrize("seconds", [0.05, 0.1, 0.15])
def test_no_task_survives_a_delivery_that_is_closed_while_buckets_are_ahead(seconds: float) -> None:
    async def job() -> tuple[set[str], set[str]]:
        schedule = Schedule(0, {("rollout-1", "take", n): ("receiver:take", "slow") for n in range(1, 9)})
        site = Site(schedule)
        for worker in site.workers:
            await site.delivery.join(site.end(worker))
        before = asyncio.all_tasks()
        before -= {task for task in before if task.get_name().startswith("receiver-")}
        await site.delivery.publish(0)
        await asyncio.sleep(seconds)
        open_ones = {task.get_name().partition("-")[0] for task in asyncio.all_tasks() - before}
        await site.delivery.close()
        return open_ones, {task.get_name() for task in asyncio.all_tasks() - before}

    ahead, left = run_virtual(job(), horizon=HORIZON_SECONDS)
    assert "ahead" in ahead and left == set()
