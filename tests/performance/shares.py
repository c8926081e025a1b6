"""Benchmark of weights in shares (tune=full with trainer.shard=full): `python -m tests.performance.shares`.

Two ranks send to 1, 2 and 4 receivers. The *primitive* is the bare transfer of the same buckets between the same
processes: nothing is staged, digested or verified. A stall is given in copies of a rank's own share.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import ray

from async_flowrl.controller.endpoints import DELIVERIES, PUBLISHING
from async_flowrl.controller.shard_endpoints import ShardedPayload, ShardedRolloutEndpoint, ShardedTrainerEndpoint
from async_flowrl.plan.rehearsal.cards import Assumptions
from checkpoint_engine import Delivery, DeliveryOptions
from checkpoint_engine.shards import shard_layout
from separation.cluster import cluster
from separation.group import PoolSpec, Worker
from tests.performance.share_ends import whole_layout
from tests.support.toy_pool import ListObserver

RANKS = 2
SECONDS = 120.0
"""Limit of one delivery."""
WARM_UP = 3
"""Publishes that do not count: until then both ends take memory that is new."""
COPIES = {"rank": 4, "receiver": 3}
"""Upper bound of the copies of all shares in the ranks, and of the version in a receiver."""
MODEL_BYTES, MODEL_GPUS = 41e9, 4
NETWORKS = {"100 Gbit/s": 12.5e9, "400 Gbit/s": 50e9}
"""Bytes per second of a receiver's network."""


class Site:
    """Ranks, receivers and the delivery between them."""

    def __init__(self, ranks: Sequence[Worker], receivers: Sequence[Worker], megabytes: float, bucket: int) -> None:
        self.ranks, self.receivers, self.bucket = ranks, receivers, bucket
        self.layout = whole_layout(megabytes)
        self.sizes = [shard_layout(self.layout, len(ranks), index).nbytes for index in range(len(ranks))]
        sender = ShardedTrainerEndpoint(ranks, self.layout, bucket, lambda header: None)
        options = DeliveryOptions(retries=0, deadline=SECONDS, retain=1, max_fan_out=99, node_fan_out=99)
        self.delivery = Delivery(sender, replace=self._lost, options=options, ahead=sender.send_ahead)  # type: ignore[arg-type]

    async def open(self) -> None:
        for worker in self.receivers:
            await self.delivery.join(ShardedRolloutEndpoint(worker, ListObserver(), "object_store"))
        members, port = [*self.ranks, *self.receivers], await self.ranks[0].call("serve")
        await asyncio.gather(*(w.call("open", "127.0.0.1", port, len(members), i) for i, w in enumerate(members)))

    async def _lost(self, name: str, error: BaseException) -> None:
        raise error

    async def measured(self, version: int) -> dict[str, float]:
        """Publishes a version, then measures the primitives, the copies and the activation."""
        await self._all(self.ranks, "train", version)
        began = time.perf_counter()
        await self.delivery.publish(version)
        staged = time.perf_counter()
        await self.delivery.drain()
        delivered = time.perf_counter()
        stalls = await self._all(self.ranks, "stalled")
        activation = await self._all(self.receivers, "activate", version)
        store, gloo = await self._store(), await self._gloo()
        return {
            "publish_seconds": staged - began,
            "delivery_seconds": delivered - staged,
            "stall_copies": max(stall / copy for stall, copy in stalls),
            "activate_seconds": max(activation),
            "primitive_seconds": store,
            "gloo_seconds": gloo,
            "fraction": store / (delivered - staged),
            "fraction_of_gloo": gloo / (delivered - staged),
        }

    async def _store(self) -> float:
        payload = ShardedPayload(self.ranks, "raw", 0, self.bucket, SECONDS)
        began = time.perf_counter()
        await asyncio.gather(*(self._taken(worker, payload) for worker in self.receivers))
        return time.perf_counter() - began

    async def _taken(self, worker: Worker, payload: ShardedPayload) -> None:
        coming = payload.buckets(self.layout)
        for place, (shard, start) in enumerate(coming):
            ref = await payload.bucket(shard, start)
            for following in coming[place + 1 : place + 1 + len(self.ranks)]:
                payload.fetch(*following)
            await worker.call("take_raw", start, ref, lane=DELIVERIES)

    async def _gloo(self) -> float:
        began = time.perf_counter()
        await self._all([*self.ranks, *self.receivers], "broadcast", self.sizes, self.bucket)
        return time.perf_counter() - began

    async def _all(self, workers: Sequence[Worker], method: str, *arguments: Any) -> list[Any]:
        return await asyncio.gather(*(worker.call(method, *arguments) for worker in workers))


@contextlib.asynccontextmanager
async def site(megabytes: float, receivers: int, bucket: int) -> AsyncIterator[Site]:
    ends = "tests.performance.share_ends"
    pools = [
        PoolSpec(
            "trainer", f"{ends}:SendingRank", RANKS, {"ranks": RANKS, "megabytes": megabytes}, lanes=(PUBLISHING,)
        ),
        PoolSpec("rollout", f"{ends}:TakingWorker", receivers, {"megabytes": megabytes}, lanes=(DELIVERIES,)),
    ]
    async with cluster(pools, start_deadline=SECONDS) as groups:
        made = Site(groups["trainer"].workers, groups["rollout"].workers, megabytes, bucket)
        await made.open()
        try:
            yield made
        finally:
            await made.delivery.close()


async def measure(megabytes: float, receivers: int, options: argparse.Namespace) -> dict[str, Any]:
    """Returns medians over `options.repeats` publishes after WARM_UP that do not count."""
    async with site(megabytes, receivers, options.bucket) as made:
        rows = [await made.measured(version) for version in range(WARM_UP + options.repeats)][WARM_UP:]
    found = {key: median(row[key] for row in rows) for key in rows[0]}
    return {"megabytes": megabytes, "receivers": receivers, **found}


def obstacle(megabytes: float, receivers: int) -> str | None:
    """Returns why a row cannot be measured on this machine, or None."""
    needed = megabytes / 1000 * (COPIES["rank"] + COPIES["receiver"] * receivers + 1) + 0.4 * (RANKS + receivers)
    free = psutil.virtual_memory().available / 1e9
    return f"{megabytes:g} MB to {receivers}: may take {needed:.0f} GB, {free:.0f} are free" if needed > free else None


def predicted(fraction: float, given: Assumptions) -> list[str]:
    """Returns sentences on 41 GB from 4 trainer to 4 rollout GPUs, each on a node of its own, at stated link speeds.

    A rank copies its share from its GPU, each receiver's network carries the whole model at `fraction` of its rate, and
    the activation is one copy to the GPU; the first two overlap. These are lower bounds: the processes keep up with the
    network, whose rate may exceed that of the one thread with which a receiver copies and digests.
    """
    from_gpu = MODEL_BYTES / MODEL_GPUS / given.host_bytes_per_second
    to_gpu = MODEL_BYTES / given.host_bytes_per_second
    return [
        f"predicted at best, not measured: 41 GB over {MODEL_GPUS} -> {MODEL_GPUS} GPUs with {name} for each receiver: "
        f"{max(from_gpu, MODEL_BYTES / (rate * fraction)):.1f} s of delivery beside training and sampling, "
        f"{to_gpu:.1f} s of activation at {given.host_bytes_per_second / 1e9:g} GB/s"
        for name, rate in NETWORKS.items()
    ]


def report(cells: Sequence[dict[str, Any]], skipped: Sequence[str]) -> str:
    head = "| MB | receivers | delivery s | primitive s | fraction | gloo s | trainer stall, copies | activation s |"
    lines = [head, "|" + "---|" * 8]
    lines += [
        f"| {c['megabytes']:g} | {c['receivers']} | {c['delivery_seconds']:.3f} | {c['primitive_seconds']:.3f} "
        f"| {c['fraction']:.2f} | {c['gloo_seconds']:.3f} | {c['stall_copies']:.2f} | {c['activate_seconds']:.3f} |"
        for c in cells
    ]
    large = [cell for cell in cells if cell["megabytes"] == max(each["megabytes"] for each in cells)]
    lines += ["", *(f"- not measured: {reason}" for reason in skipped)]
    return "\n".join([*lines, *(f"- {s}" for s in predicted(median(c["fraction"] for c in large), Assumptions()))])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.performance.shares", description=__doc__)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[50.0, 500.0, 2000.0])
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket", type=int, default=64 << 20, help="bytes")
    parser.add_argument("--seconds", type=float, default=400.0, help="begin no further row after so long")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    options = parser.parse_args(arguments)
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    store = int(40 * options.bucket + 100e6)
    ray.init(
        address="local",
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=store,
    )
    cells: list[dict[str, Any]] = []
    skipped: list[str] = []
    began = time.monotonic()
    for megabytes in options.megabytes:
        for receivers in options.receivers:
            reason = obstacle(megabytes, receivers)
            if reason is None and time.monotonic() - began > options.seconds:
                reason = f"{megabytes:g} MB to {receivers}: {options.seconds:g} s had passed"
            if reason is not None:
                skipped.append(reason)
                continue
            cells.append(asyncio.run(measure(megabytes, receivers, options)))
            sys.stderr.write(f"{megabytes:g} MB to {receivers}: done\n")
    ray.shutdown()
    if options.out is not None:
        options.out.write_text(json.dumps({"load": os.getloadavg(), "cells": cells, "skipped": skipped}, indent=1))
    sys.stdout.write(report(cells, skipped) + "\n")


if __name__ == "__main__":
    main()
