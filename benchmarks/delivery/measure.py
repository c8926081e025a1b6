"""Measurements of the benchmark: deliveries and bare transfers, stalls, event loop lag, and recovery after a SIGKILL.

The *primitive* is the bare transfer of the same bytes by the same transport, without verification.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict
from operator import truediv
from statistics import median
from typing import Any

import psutil
import ray
import torch

from benchmarks.delivery.actors import ON_GPUS, ReceiverEnd, Receiving, SenderEnd, Sending
from checkpoint_engine.base import DeliveryOptions
from checkpoint_engine.collective_delivery import CollectiveBroadcast
from checkpoint_engine.delivery import Delivery
from checkpoint_engine.process_group import SENDER
from checkpoint_engine.transports import OBJECT_STORE

TICK_SECONDS = 0.002
"""Pause between two measurements of the event loop's lag."""
WARM_UP_PUBLISHES = 2
"""Publishes that are not measured, as they allocate buffers and form the group."""
MAX_SENDER_COPIES, MAX_RECEIVER_COPIES, MAX_STORE_COPIES = 5, 4, 4
"""Upper bounds for payload-sized buffers in each process and in Ray's store, with those of the primitive."""
KILL_MEGABYTES, KILL_RECEIVERS = 50.0, 3


@contextlib.contextmanager
def ray_here(megabytes: float) -> Iterator[None]:
    """Connects to a Ray cluster of its own, as a run does, with room for `megabytes` in its object store.

    A process that is connected already measures there.
    """
    if ray.is_initialized():
        yield
        return
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1"}
    store, quiet = int((megabytes + 100) * 1e6), {"log_to_driver": False, "logging_level": "ERROR"}
    ray.init("local", num_cpus=16, include_dashboard=False, object_store_memory=store, **quiet)
    try:
        yield
    finally:
        ray.shutdown()


class Rig:
    """A sending actor, receiving actors, and a delivery between them whose controller is this process."""

    def __init__(self, transport: str, megabytes: float, receivers: int, nodes: Sequence[str] = ()) -> None:
        """`nodes`: addresses, of the sender's node and of one for each receiver; empty leaves it to Ray.

        Between given nodes the raw primitive of a collective is not measured.
        """
        self.transport, self.placed = transport, bool(nodes)
        sending, *receiving = nodes or [""] * (receivers + 1)
        self.sender = SenderEnd(Sending, "sender", transport, megabytes, sending)
        self.receivers = [
            ReceiverEnd(Receiving, f"r{i}", transport, megabytes, node) for i, node in enumerate(receiving)
        ]
        self.ends = [self.sender, *self.receivers]
        broadcast = None if transport == OBJECT_STORE else CollectiveBroadcast(self.sender, name=transport)
        options = DeliveryOptions(retain=1)
        self.delivery = Delivery(self.sender, replace=self._replace, options=options, broadcast=broadcast)

    async def open(self) -> None:
        await self.ask(self.ends, "pid")
        for receiver in self.receivers:
            await self.delivery.join(receiver)
        if self.transport != OBJECT_STORE and not self.placed:
            address = await self.sender.address()
            opening = (end.call("open", *address, len(self.ends), rank) for rank, end in enumerate(self.ends, SENDER))
            await asyncio.gather(*opening)

    async def publish(self, version: int) -> None:
        """Makes a version and delivers it."""
        await self.sender.call("train", version)
        await self.delivery.publish(version)
        await self.delivery.drain()

    async def ask(self, ends: list[Any], method: str, *arguments: Any) -> list[Any]:
        """Calls a method of all ends concurrently; returns their results in order."""
        return await asyncio.gather(*(end.call(method, *arguments) for end in ends))

    async def primitive(self) -> float:
        """Returns the seconds of the bare transfer of the same bytes to all receivers."""
        began = time.perf_counter()
        if self.transport == OBJECT_STORE:
            await self.ask(self.receivers, "get", self.sender.start("put"))
        else:
            await self.ask(self.ends, "broadcast")
        return time.perf_counter() - began

    async def close(self) -> None:
        await self.delivery.close()
        await asyncio.gather(*(end.close() for end in self.ends))

    async def _replace(self, name: str, error: BaseException) -> None:
        """Does nothing: a killed receiver is not replaced."""


@contextlib.asynccontextmanager
async def rig(transport: str, megabytes: float, receivers: int, nodes: Sequence[str] = ()) -> AsyncIterator[Rig]:
    made = Rig(transport, megabytes, receivers, nodes)
    try:
        await made.open()
        yield made
    finally:
        await made.close()


async def measure(transport: str, megabytes: float, receivers: int, *, repeats: int) -> dict[str, Any]:
    """Measures one row of the table: medians over `repeats` publishes, each followed by the primitive and a copy.

    Raises RuntimeError if a publish did not go by the transport.
    """
    async with rig(transport, megabytes, receivers) as made:
        rows, lags = [], []
        for version in range(WARM_UP_PUBLISHES + repeats):
            row, lag = await _publish(made, version)
            async with _watched([]):  # so that measuring the loop's lag costs both the same
                row["primitive_seconds"] = await made.primitive()
            row["memcpy_seconds"] = await made.sender.call("copy")
            activations = await made.ask(made.receivers, "activate", version)
            copies = await made.ask(made.receivers, "copy")
            row["activate_seconds"] = max(activations)
            row["fraction_of_primitive"] = row["primitive_seconds"] / row["delivery_seconds"]
            row["trainer_stall_memcpys"] = row["stall_seconds"] / row["memcpy_seconds"]
            row["worker_stall_memcpys"] = median(map(truediv, activations, copies))
            rows.append(row)
            lags.append(lag)
        stats = made.delivery.stats
        if others := stats.fallbacks + stats.member_busy:
            raise RuntimeError(f"{others} of {stats.publishes} publishes went by the object store instead")
        measured, ticks = rows[WARM_UP_PUBLISHES:], sorted(lag for each in lags[WARM_UP_PUBLISHES:] for lag in each)
        return {
            "transport": transport,
            "megabytes": megabytes,
            "receivers": receivers,
            **{key: median(row[key] for row in measured) for key in measured[0]},
            "loop_lag_p99_seconds": ticks[int(0.99 * (len(ticks) - 1))],
            "loop_lag_seconds": ticks[-1],
            "stats": asdict(stats),
        }


async def _publish(made: Rig, version: int) -> tuple[dict[str, float], list[float]]:
    """Returns the seconds of the stall (`publish`) and of the delivery after it, and the loop's lags meanwhile."""
    await made.sender.call("train", version)
    lags: list[float] = []
    async with _watched(lags):
        began = time.perf_counter()
        await made.delivery.publish(version)
        staged = time.perf_counter()
        await made.delivery.drain()
        done = time.perf_counter()
        await asyncio.sleep(TICK_SECONDS)
    return {"stall_seconds": staged - began, "delivery_seconds": done - staged}, lags


@contextlib.asynccontextmanager
async def _watched(lags: list[float]) -> AsyncIterator[None]:
    watching = asyncio.create_task(_watch(lags))
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _watch(lags: list[float]) -> None:
    while True:
        expected = time.perf_counter() + TICK_SECONDS
        await asyncio.sleep(TICK_SECONDS)
        lags.append(time.perf_counter() - expected)


async def after_kill(transport: str) -> dict[str, Any]:
    """Measures the seconds from a SIGKILL of a receiver during a delivery until all survivors have acknowledged."""
    async with rig(transport, KILL_MEGABYTES, KILL_RECEIVERS) as made:
        served: dict[str, float] = {}
        victim, *survivors = made.receivers
        pid = await victim.call("pid")
        for version in range(2):
            await made.publish(version)
        made.delivery.on_ack = lambda name, ack: served.update({name: time.perf_counter()})
        await made.delivery.publish(2)
        os.kill(pid, signal.SIGKILL)
        killed = time.perf_counter()
        await made.delivery.drain()
        if not all(end.name in served for end in survivors):
            raise RuntimeError(f"{len(survivors)} survivors were to be served, {sorted(served)} were")
        seconds = max(served[end.name] for end in survivors) - killed
        return {"transport": transport, "megabytes": KILL_MEGABYTES, "survivors": len(survivors), "seconds": seconds}


def obstacle(transport: str, megabytes: float, receivers: int) -> str | None:
    """Returns the reason why a row cannot be measured on this machine (memory, GPUs), or None."""
    name = f"{transport} {megabytes:g} MB to {receivers}"
    if transport in ON_GPUS and torch.cuda.device_count() <= receivers:
        return f"{name}: needs {receivers + 1} GPUs, {torch.cuda.device_count()} are here"
    return too_large(name, memory_needed(megabytes, receivers))


def too_large(name: str, gigabytes: float) -> str | None:
    """Returns that a row may take more gigabytes than are free, or None."""
    free = psutil.virtual_memory().available / 1e9
    return f"{name}: may take {gigabytes:.0f} GB, {free:.0f} GB are free" if gigabytes > free else None


def memory_needed(megabytes: float, receivers: int) -> float:
    """Returns the gigabytes that a row may take, in all processes and Ray's store together."""
    copies = MAX_SENDER_COPIES + MAX_RECEIVER_COPIES * receivers + MAX_STORE_COPIES
    return megabytes * copies / 1000 + 0.4 * (receivers + 1)
