"""Tests of gathers of a real model from two ranks under FSDP2, each a process, to receivers in this process."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from async_flowrl.controller.endpoints import TrainerEndpoint
from async_flowrl.controller.rank_weights import ShardedWeights
from async_flowrl.policies.registry import resolve_model
from checkpoint_engine import PROOF_VERSION, Delivery, DeliveryOptions, Header, Receiver, check_binding
from checkpoint_engine import tensor_probe as probe_of
from separation.group import WorkerDied, WorkerFailed
from separation.rendezvous import join_process_group
from separation.supervise import together
from tests.support.live import live_digest
from tests.support.process_pool import ProcessPool
from tests.unit.checkpoint_engine.engine_parts import End
from tests.unit.checkpoint_engine.engine_virtual import failing
from tests.unit.training.test_full_shards import full_config

pytestmark = pytest.mark.serial("runs")

SECONDS = 120.0
BUCKET = 4000
"""Bytes, of which a version has many times as many."""


@dataclass
class Site:
    ranks: ProcessPool
    weights: ShardedWeights
    sender: TrainerEndpoint
    delivery: Delivery
    proof: tuple[Header, Any, dict[str, Any]]
    headers: dict[int, Header]
    replaced: list[str]

    def end(self, name: str, fault: Callable[..., Any] | None = None) -> End:
        layout = self.proof[0].layout
        live = {name: tensor.clone() for name, tensor in layout.views(layout.empty().zero_()).items()}
        return End(Receiver(live, capacity=2, on_host=True), name, fault=fault)

    async def publish(self, version: int) -> None:
        await self.delivery.publish(version)
        await self.delivery.drain()

    async def all(self, method: str, *arguments: Any, lane: str = "main") -> list[Any]:
        return await together(*(rank.call(method, *arguments, lane=lane) for rank in self.ranks.workers))

    async def masters(self) -> dict[str, np.ndarray[Any, Any]]:
        shares = await self.all("weights")
        return {name: np.concatenate([share[name] for share in shares]) for name in shares[0]}


def with_two_ranks(test: Callable[[Site], Awaitable[None]]) -> None:
    async def run() -> None:
        config = full_config(num_workers=2)
        config.checkpoint_engine.bucket_bytes, config.deadlines.publish = BUCKET, SECONDS
        arguments = {"config": config, "model": resolve_model(config.model)}
        pool = ProcessPool("trainer", 2, "tests.support.dying_gather:DyingGather", arguments)
        headers, replaced = dict[int, Header](), list[str]()

        async def replace(name: str, error: BaseException) -> None:
            replaced.append(name)

        try:
            await join_process_group(pool, timeout=300)
            await together(*(rank.call("load") for rank in pool.workers))
            weights = ShardedWeights(pool)
            sender = weights.sender(config, lambda header: headers.update({header.version: header}))
            proof = await sender.proof()
            delivery = Delivery(sender, replace=replace, options=DeliveryOptions(deadline=SECONDS, retain=2))
            async with asyncio.timeout(SECONDS):
                await test(Site(pool, weights, sender, delivery, proof, headers, replaced))
            await delivery.close()
        finally:
            await pool.close()

    asyncio.run(run())


def test_what_arrives_are_the_masters_and_an_older_version_is_gathered_between_two_calls_to_train() -> None:
    async def test(site: Site) -> None:
        header, data, probe = site.proof
        end = site.end("early")
        end.receiver.receive(header, data)
        end.receiver.activate("policy", PROOF_VERSION)
        check_binding(probe, probe_of(end.receiver.tensors))
        await site.delivery.join(end)
        wanted = []
        for version in range(2):
            if version:
                await site.all("next_version")
            wanted.append(await site.masters())
            await site.publish(version)
        assert [version for _, version, _ in end.receiver.held()] == [0, 1]
        late = site.end("late", failing(1))
        async with site.weights.training:  # The ranks train.
            joining = asyncio.ensure_future(site.delivery.join(late, [0, 1]))
            await asyncio.sleep(0.5)
            assert late.receiver.held() == ()
        assert await joining
        for each in (end, late):
            for version, tensors in enumerate(wanted):
                each.receiver.activate("policy", version)
                assert live_digest(each.receiver) == site.headers[version].digest
                live = each.receiver.tensors
                assert all(torch.equal(live[name], torch.from_numpy(tensors[name])) for name in tensors)
        assert site.delivery.stats.corrupt == 1 and site.replaced == []

    with_two_ranks(test)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("late", [False, True], ids=["the newest version", "an older version"])
def test_a_rank_killed_in_a_bucket_of_a_gather_is_known_to_be_dead_and_nothing_torn_is_served(
    rank: int, late: bool
) -> None:
    async def test(site: Site) -> None:
        end, other = site.end("early"), site.end("late")
        await site.delivery.join(end)
        for version in range(2 if late else 1):
            if version:
                await site.all("next_version")
            await site.publish(version)
        held = end.receiver.held()
        if not late:
            await site.all("next_version")
        await site.ranks.workers[rank].call("die_in", 2)
        with pytest.raises((WorkerDied, WorkerFailed)) as raised:
            await (site.delivery.join(other, [0, 1]) if late else site.publish(1))
        assert raised.value.worker in ("trainer-0", "trainer-1")
        await site.ranks.workers[rank].gone()
        assert site.replaced == [], "receivers are not to blame"
        assert end.receiver.held() == held and other.receiver.held() == ()
        end.receiver.activate("policy", held[-1][1])
        assert live_digest(end.receiver) == site.headers[held[-1][1]].digest

    with_two_ranks(test)
