"""Benchmark of weights in shares (tune=full with trainer.shard=full): `python -m benchmarks.shares`.

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
from benchmarks.share_ends import whole_layout
from benchmarks.share_report import into_page, report
from checkpoint_engine import Delivery, DeliveryOptions
from checkpoint_engine.shards import shard_layout
from separation.cluster import cluster
from separation.group import PoolSpec, Worker
from tests.support.toy_pool import ListObserver

RANKS = 2
SECONDS = 120.0
"""Limit of one delivery."""
WARM_UP = 3
"""Publishes that do not count: until then both ends take memory that is new."""
COPIES = {"rank": 4, "receiver": 3}
"""Upper bound of the copies of all shares in the ranks, and of the version in a receiver."""


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
            "publish_copies": (staged - began) / max(copy for _, copy in stalls),
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
        for number, (shard, start) in enumerate(coming):
            ref = await payload.bucket(shard, start)
            for following in coming[number + 1 : number + 1 + len(self.ranks)]:
                payload.fetch(*following)
            await worker.call("take_raw", self.sizes, shard, start, ref, lane=DELIVERIES)

    async def _gloo(self) -> float:
        began = time.perf_counter()
        await self._all([*self.ranks, *self.receivers], "broadcast", self.sizes, self.bucket)
        return time.perf_counter() - began

    async def _all(self, workers: Sequence[Worker], method: str, *arguments: Any) -> list[Any]:
        return await asyncio.gather(*(worker.call(method, *arguments) for worker in workers))


@contextlib.asynccontextmanager
async def site(megabytes: float, receivers: int, bucket: int) -> AsyncIterator[Site]:
    ends = "benchmarks.share_ends"
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
    medians = {key: median(row[key] for row in rows) for key in rows[0]}
    return {"megabytes": megabytes, "receivers": receivers, **medians}


def obstacle(megabytes: float, receivers: int) -> str | None:
    """Returns why a row cannot be measured on this machine, or None."""
    needed = megabytes / 1000 * (COPIES["rank"] + COPIES["receiver"] * receivers + 1) + 0.4 * (RANKS + receivers)
    free = psutil.virtual_memory().available / 1e9
    return f"{megabytes:g} MB to {receivers}: may take {needed:.0f} GB, {free:.0f} are free" if needed > free else None


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures all rows for which there are memory and time; returns the result as plain JSON."""
    cells: list[dict[str, Any]] = []
    skipped: list[str] = []
    load, began = os.getloadavg(), time.monotonic()
    for megabytes in options.megabytes:
        for receivers in options.receivers:
            reason = obstacle(megabytes, receivers)
            if reason is None and time.monotonic() - began > options.seconds:
                reason = f"{megabytes:g} MB to {receivers}: {options.seconds:g} s had passed"
            if reason is not None:
                skipped.append(reason)
                continue
            cells.append(await measure(megabytes, receivers, options))
            sys.stderr.write(f"{megabytes:g} MB to {receivers}: done\n")
    machine = {"cores": os.cpu_count(), "date": time.strftime("%Y-%m-%d"), "load": load, "load_after": os.getloadavg()}
    return {"machine": machine, "repeats": options.repeats, "cells": cells, "skipped": skipped}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, or reads an earlier result; then prints the report, and writes it into a page.

    A process that is connected to a Ray cluster measures there.
    """
    options = _parser().parse_args(arguments)
    if options.read is None:
        if ours := not ray.is_initialized():
            _start_ray(options.bucket)
        result = asyncio.run(run(options))
        if ours:
            ray.shutdown()
    else:
        result = json.loads(options.read.read_text(encoding="utf-8"))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    if options.page is not None:
        options.page.write_text(into_page(options.page.read_text(encoding="utf-8"), result), encoding="utf-8")
    sys.stdout.write(report(result) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shares", description=__doc__)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[50.0, 500.0, 2000.0])
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket", type=int, default=64 << 20, help="bytes")
    parser.add_argument("--seconds", type=float, default=400.0, help="begin no further row after so long")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    parser.add_argument("--read", type=Path, help="such a file of an earlier run, instead of measuring")
    parser.add_argument("--page", type=Path, help="a Markdown page that gets the report, between its two markers")
    return parser


def _start_ray(bucket: int) -> None:
    """Starts a Ray cluster of its own, whose object store has room for what a delivery may keep there."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    ray.init(
        address="local",
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=int(40 * bucket + 100e6),
    )


if __name__ == "__main__":
    main()
