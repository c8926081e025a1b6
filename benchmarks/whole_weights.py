"""Benchmark of the delivery of whole weights (tune=full, trainer.shard=full): `python -m benchmarks.whole_weights`.

Two ranks, which have half of the rows each, send to 1, 2 and 4 receivers by the object store, all on this machine. A
delivery begins when a version is staged; it is gathered, sealed, put into the object store, received and verified.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import product
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from async_flowrl.config.schema import Config
from async_flowrl.controller.endpoints import DELIVERIES, PUBLISHING, RolloutEndpoint
from async_flowrl.controller.rank_weights import ShardedWeights
from async_flowrl.types import POLICY
from benchmarks.delivery.measure import ray_here, too_large
from benchmarks.markdown_tables import markdown_table, write_between
from checkpoint_engine import Delivery, DeliveryOptions, Header, Layout, Receiver
from checkpoint_engine.gather import Gather, GatheredVersions, shard_layout
from separation.cluster import cluster
from separation.group import PoolSpec
from separation.rendezvous import join_process_group
from tests.support.toy_pool import ListObserver

RANKS, TENSORS, SECONDS, WARM_UP = 2, 64, 120.0, 3
"""The first publishes do not count: until then both ends take memory that is new. SECONDS limits one delivery."""
COPIES = {"ranks": 4, "store": 2, "receiver": 3}
"""Upper bound of the copies of a version in the ranks, in the object store, and in a receiver."""
SECTION = "delivery"
"""Name of the part of a page that gets the report, as its two markers have it."""
COLUMNS = ("MB", "receivers", "publish s", "gather s", "delivery s", "activation s")


def whole_layout(megabytes: float) -> Layout:
    """Returns the layout of `megabytes` (10^6 bytes) of bfloat16 in TENSORS matrices, on no device."""
    rows = int(megabytes * 1e6) // (2 * TENSORS * 256)
    like = torch.empty(rows, 256, dtype=torch.bfloat16, device="meta")
    return Layout.of({f"t{index:02d}": like for index in range(TENSORS)})


class SendingRank:
    """A trainer rank, as far as the rows that it has are concerned."""

    def __init__(self, index: int, name: str, megabytes: float) -> None:
        self._layout, self._index = whole_layout(megabytes), index
        self.gathering = 0.0

    def open(self, bucket: int) -> None:
        """Joins the group of the gathers; all ranks have joined the default group."""
        group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=SECONDS))
        self._gather = Gather(self._layout, group, bucket_bytes=bucket)
        self._flat = shard_layout(self._layout, RANKS, self._index).empty().zero_().view(torch.bfloat16)
        self.sender = SimpleNamespace(
            policy=GatheredVersions(self._gather, POLICY), stage=self.stage, gather=self.gather
        )

    def train(self, version: int) -> None:
        self._flat.fill_(version % 251)

    def stage(self, version: int, stream: str) -> None:
        self._share = self._gather.share(self._flat)

    def gather(self, version: int, stream: str) -> Header | None:
        began = time.perf_counter()
        header = self.sender.policy.gather(version, self._share)
        self.gathering = time.perf_counter() - began
        return header

    def gathered(self) -> float:
        """Returns the seconds of the last gather."""
        return self.gathering


class TakingWorker:
    """A rollout worker's receiver."""

    def __init__(self, index: int, name: str, megabytes: float) -> None:
        layout = whole_layout(megabytes)
        self.receiver = Receiver(layout.views(layout.empty().zero_()), capacity=1, on_host=True)

    def activate(self, version: int) -> float:
        """Returns the seconds of the activation of a version."""
        began = time.perf_counter()
        self.receiver.activate(POLICY, version)
        return time.perf_counter() - began


async def measure(megabytes: float, receivers: int, bucket: int, repeats: int) -> dict[str, float]:
    """Returns medians over `repeats` publishes after WARM_UP, by column."""
    config, given = Config(), {"megabytes": megabytes}
    config.deadlines.publish = SECONDS
    pools = [
        PoolSpec("trainer", "benchmarks.whole_weights:SendingRank", RANKS, given, lanes=(PUBLISHING,)),
        PoolSpec("rollout", "benchmarks.whole_weights:TakingWorker", receivers, given, lanes=(DELIVERIES,)),
    ]

    async def lost(name: str, error: BaseException) -> None:
        raise error

    rows: list[tuple[float, ...]] = []
    async with cluster(pools, start_deadline=SECONDS) as groups:
        ranks, workers = groups["trainer"].workers, groups["rollout"].workers
        await join_process_group(groups["trainer"], timeout=SECONDS)
        await asyncio.gather(*(rank.call("open", bucket) for rank in ranks))
        sender = ShardedWeights(groups["trainer"]).sender(config, lambda header: None)
        options = DeliveryOptions(retries=0, deadline=SECONDS, retain=1)
        delivery = Delivery(sender, replace=lost, options=options)
        for worker in workers:
            await delivery.join(RolloutEndpoint(worker, ListObserver()))
        for version in range(WARM_UP + repeats):
            await asyncio.gather(*(rank.call("train", version) for rank in ranks))
            began = time.perf_counter()
            await delivery.publish(version)
            staged = time.perf_counter()
            await delivery.drain()
            delivered = time.perf_counter()
            gathering = await ranks[0].call("gathered")
            activation = max(await asyncio.gather(*(worker.call("activate", version) for worker in workers)))
            rows.append((staged - began, gathering, delivered - staged, activation))
        await delivery.close()
    values = [median(column) for column in zip(*rows[WARM_UP:], strict=True)]
    return dict(zip(COLUMNS, (megabytes, receivers, *values), strict=True))


def obstacle(megabytes: float, receivers: int) -> str | None:
    """Returns why a row cannot be measured on this machine, or None."""
    copies = COPIES["ranks"] + COPIES["store"] + COPIES["receiver"] * receivers
    return too_large(f"{megabytes:g} MB to {receivers}", megabytes / 1000 * copies + 0.4 * (RANKS + receivers))


def report(result: dict[str, Any]) -> str:
    """Returns the table, and what is to be known of it, as Markdown."""
    rows = [[format(row[name], "g" if name in COLUMNS[:2] else ".3f") for name in COLUMNS] for row in result["rows"]]
    load = " ".join(f"{value:.1f}" for value in (*result["load"], *os.getloadavg()))
    about = f"{os.cpu_count()} cores, {result['date']}, medians of {result['repeats']}; load before and after: {load}"
    return "\n\n".join([markdown_table(COLUMNS, rows), "\n".join(f"- {line}" for line in (about, *result["skipped"]))])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints the report, and writes it into a page. A connected process measures on its Ray cluster."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whole_weights", description=__doc__)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[50.0, 500.0, 2000.0])
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket", type=int, default=64 << 20, help="bytes")
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    parser.add_argument("--page", type=Path, help="a Markdown page that gets the report, between its two markers")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {"rows": [], "skipped": [], "load": os.getloadavg(), "repeats": options.repeats}
    result["date"] = time.strftime("%Y-%m-%d")
    with ray_here(2.5 * max(options.megabytes)):
        for megabytes, receivers in product(options.megabytes, options.receivers):
            if reason := obstacle(megabytes, receivers):
                result["skipped"].append(f"not measured: {reason}")
            else:
                result["rows"].append(asyncio.run(measure(megabytes, receivers, options.bucket, options.repeats)))
                sys.stderr.write(f"{megabytes:g} MB to {receivers}: done\n")
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    if options.page is not None:
        write_between(options.page, SECTION, report(result))
    sys.stdout.write(report(result) + "\n")


if __name__ == "__main__":
    main()
