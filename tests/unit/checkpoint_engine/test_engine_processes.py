"""Tests of deliveries between real processes: every transport, deaths in every phase, changing receivers."""

import asyncio
import logging

import pytest
import torch

from checkpoint_engine import process_group as links_module
from tests.unit.checkpoint_engine.engine_processes import BUCKET_BYTES, rig, usage

pytestmark = pytest.mark.serial("runs")

OTHER_DTYPES = (torch.int8, torch.float64)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "BUCKET_BYTES", BUCKET_BYTES)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHER_DTYPES)], ids=str
)
def test_the_bytes_are_the_same_by_every_transport(dtype: torch.dtype) -> None:
    async def deliver(transport: str) -> list[dict[str, torch.Tensor]]:
        async with rig(transport, names=("a", "b"), dtype=dtype) as made:
            received = []
            for version in range(3):
                await made.publish(version)
                await made.check("a", "b", version=version)
                received.append((await made.children["b"].weights(version))[0])
                made.train()
            assert made.delivery.stats.fallbacks == 0 and made.delivery.stats.retries == 0
            return received

    by_store, by_gloo = (asyncio.run(deliver(transport)) for transport in ("object_store", "gloo"))
    for one, other in zip(by_store, by_gloo, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)) for name in one)


DEATHS = ("dies before", "dies between", "dies after", "silent between")
WIDE = {"modules": 4, "width": 2048}
"""Several buckets, so that there is a between."""


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=pytest.mark.slow if "silent" in fault else ()) for fault in DEATHS]
)
def test_a_receiver_lost_in_any_phase_of_a_broadcast_hangs_nobody(fault: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        impatient = {"deadline": 5.0, "patience": 5.0} if "silent" in fault else {}
        async with rig("gloo", names=("a", "c"), retries=1, **impatient, **WIDE) as made:
            await made.join("b", fault=fault)
            await made.publish(0)
            await made.check("a", "b", "c", version=0)
            made.train()
            await made.publish(1)
            assert made.replaced == [("b", "TimeoutError" if "silent" in fault else "ConnectionResetError")]
            assert "version 1 goes without gloo" in caplog.text
            await made.check("a", "c", version=1)
            assert made.delivery.stats.fallbacks == 1
            made.train()
            await made.publish(2)
            await made.check("a", "c", version=2)
            assert made.delivery.stats.fallbacks == 1, "the survivors meet in a new epoch"
            assert made.broadcast is not None and made.broadcast.failures == 1

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())


def small(grown: dict[str, int]) -> bool:
    """Memory: less than the fifty payloads of 393 KB that half of the publishes would have left at least."""
    return max(grown["threads"] - 3, grown["fds"] - 6, grown["sockets"] - 6) <= 0 and grown["kilobytes"] < 16_384


@pytest.mark.extended
@pytest.mark.parametrize("transport", ["object_store", "gloo"])
@pytest.mark.parametrize("publishes", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_long_life_costs_no_memory_threads_or_descriptors(publishes: int, transport: str) -> None:
    """Every tenth publish meets in a new epoch."""

    async def main() -> None:
        async with rig(transport, names=("a", "b"), width=4096) as made:
            warm: list[dict[str, int]] = []
            for version in range(publishes):
                made.train()
                await made.publish(version)
                if version % 10 == 0 and made.broadcast is not None:
                    made.broadcast.members = ()
                if version == publishes // 2:
                    warm = [usage(), made.children["a"].ask("usage"), made.children["b"].ask("usage")]
            assert made.delivery.stats.fallbacks == 0
            for _ in range(100):  # groups that were left go beside everything else, on a busy machine late
                await asyncio.sleep(0.5)
                end = [usage(), made.children["a"].ask("usage"), made.children["b"].ask("usage")]
                grown = [{k: after[k] - before[k] for k in before} for before, after in zip(warm, end, strict=True)]
                if all(map(small, grown)):
                    break
            assert all(map(small, grown)), grown

    asyncio.run(main())
