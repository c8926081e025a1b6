"""What is measured: deliveries beside the raw primitive, stalls, the event loop's lag, and life after a SIGKILL."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from operator import truediv
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from checkpoint_engine.benchmark.receiving import LIMIT, Bare, Process, ask, memcpy, tensors_of
from checkpoint_engine.collective_delivery import CollectiveBroadcast
from checkpoint_engine.delivery import Delivery
from checkpoint_engine.object_store import SharedMemoryStore
from checkpoint_engine.outcome import DeliveryOptions
from checkpoint_engine.publisher import Publisher
from checkpoint_engine.transports import OBJECT_STORE, member_for
from examples.checkpoint_engine.processes import ProcessSender

TICK = 0.002
"""Seconds between two looks at the event loop's lag."""
WARM_UP = 2
"""Publishes that touch their buffers and meet for the first time."""
COPIES_AT_SENDER, COPIES_AT_RECEIVER = 5, 3
"""Payload-sized buffers per process: tensors, up to three versions, the primitive's target; live, held, next."""


@dataclass
class Rig:
    """A publisher here and receivers in other processes. `lost` are those given up."""

    transport: str
    megabytes: float
    receivers: int
    processes: list[Process] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    acks: list[tuple[str, int, float]] = field(default_factory=list)
    """Name, version, when: by time.perf_counter."""

    async def open(self) -> None:
        self.tensors = tensors_of(self.megabytes)
        self.publisher = Publisher(self.tensors, retain=1)
        self.sender = ProcessSender(self.publisher, member=member_for(self.transport))
        broadcast = None if self.transport == OBJECT_STORE else CollectiveBroadcast(self.sender, name=self.transport)
        options = DeliveryOptions(retain=1)
        self.delivery = Delivery(self.sender, replace=self._replace, options=options, broadcast=broadcast)
        self.delivery.on_ack(lambda name, ack: self.acks.append((name, ack.version, time.perf_counter())))
        self.processes += [Process(f"r{i}", self.transport, self.megabytes) for i in range(self.receivers)]
        await asyncio.to_thread(ask, self.processes, "copy")
        for process in self.processes:
            await self.delivery.join(process.end)

    def newest(self) -> Tensor:
        """The bytes of the version delivered last, uint8 [nbytes], where they left from."""
        return torch.from_numpy(self.publisher.payload(self.publisher.retained()[-1])[1])

    async def _replace(self, name: str, error: BaseException) -> None:
        self.lost.append(name)

    async def close(self) -> None:
        await self.delivery.close()
        self.sender.close()
        for process in self.processes:
            process.close()


@contextlib.asynccontextmanager
async def rig(transport: str, megabytes: float, receivers: int) -> AsyncIterator[Rig]:
    made = Rig(transport, megabytes, receivers)
    try:
        await made.open()
        yield made
    finally:
        await made.close()


class Primitive:
    """The raw way of a transport to get the same bytes, from where they are, into the same slots of the same processes.

    A put is a copy into shared memory that is there already, a get a copy out of a mapping that is, as the engine's
    buffers are: fresh pages and mappings would cost several times as much, and flatter the engine.
    """

    def __init__(self, made: Rig) -> None:
        self._made, self._store = made, SharedMemoryStore()
        self._target = self._store.allocate(made.publisher.layout.nbytes)
        self._target.fill(0)
        self._bare: Bare | None = None
        if made.transport == OBJECT_STORE:
            return
        self._server = TCPStore("127.0.0.1", 0, None, True, LIMIT, wait_for_workers=False)
        world = len(made.processes) + 1
        for rank, process in enumerate(made.processes, start=1):
            process.order("open", self._server.port, rank, world)
        self._bare = Bare(self._server.port, 0, world, self._server)
        for process in made.processes:
            process.answer()

    def copy(self) -> float:
        """Seconds of one copy of the payload within this process."""
        return memcpy(torch.from_numpy(self._target), self._made.newest())

    def run(self) -> float:
        """Seconds until the last receiver has its bytes."""
        source = self._made.newest()
        began = time.perf_counter()
        if self._bare is None:
            self.copy()
            ask(self._made.processes, "get", self._store.reference(self._target))
            return time.perf_counter() - began
        for process in self._made.processes:
            process.order("broadcast")
        self._bare.broadcast(source)
        for process in self._made.processes:
            process.answer()
        return time.perf_counter() - began

    def close(self) -> None:
        self._store.close()


async def measure(transport: str, megabytes: float, receivers: int, *, repeats: int) -> dict[str, Any]:
    """One cell: medians over `repeats` publishes, each paired with the raw primitive and a copy right after it."""
    async with rig(transport, megabytes, receivers) as made:
        primitive = await asyncio.to_thread(Primitive, made)
        rows, lags = [], []
        for version in range(WARM_UP + repeats):
            row, lag = await _publish(made, version)
            async with _watched([]):  # what measures the loop's lag costs both the same
                row["primitive_seconds"] = await asyncio.to_thread(primitive.run)
            row["memcpy_seconds"] = primitive.copy()
            activations = await asyncio.to_thread(ask, made.processes, "activate", version)
            copies = await asyncio.to_thread(ask, made.processes, "copy")
            row["activate_seconds"] = max(activations)
            row["fraction_of_primitive"] = row["primitive_seconds"] / row["delivery_seconds"]
            row["trainer_stall_memcpys"] = row["stall_seconds"] / row["memcpy_seconds"]
            row["worker_stall_memcpys"] = median(map(truediv, activations, copies))
            rows.append(row)
            lags.append(lag)
        primitive.close()
        measured, seen = rows[WARM_UP:], sorted(lag for each in lags[WARM_UP:] for lag in each)
        return {
            "transport": transport,
            "megabytes": megabytes,
            "receivers": receivers,
            **{key: median(row[key] for row in measured) for key in measured[0]},
            "loop_lag_p99_seconds": seen[int(0.99 * (len(seen) - 1))],
            "loop_lag_seconds": seen[-1],
            "stats": asdict(made.delivery.stats),
        }


async def _publish(made: Rig, version: int) -> tuple[dict[str, float], list[float]]:
    """Seconds of the stall (`publish`) and of the delivery after it; how late the loop was meanwhile, tick by tick."""
    for tensor in made.tensors.values():
        tensor.fill_(float(version))
    lags: list[float] = []
    async with _watched(lags):
        began = time.perf_counter()
        await made.delivery.publish(version)
        staged = time.perf_counter()
        await made.delivery.drain()
        done = time.perf_counter()
        await asyncio.sleep(TICK)
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
        expected = time.perf_counter() + TICK
        await asyncio.sleep(TICK)
        lags.append(time.perf_counter() - expected)


async def after_kill(transport: str, *, megabytes: float = 50.0, receivers: int = 3) -> dict[str, Any]:
    """Seconds from a SIGKILL in the middle of a delivery until the last survivor acknowledged that version."""
    async with rig(transport, megabytes, receivers) as made:
        for version in range(2):
            await made.delivery.publish(version)
            await made.delivery.drain()
        await made.delivery.publish(2)
        made.processes[0].kill()
        killed = time.perf_counter()
        await made.delivery.drain()
        served = {name: when for name, version, when in made.acks if version == 2 and name != "r0"}
        if len(served) != receivers - 1:
            raise RuntimeError(f"{receivers - 1} survivors were to be served, {sorted(served)} were")
        seconds = max(served.values()) - killed
        return {"transport": transport, "megabytes": megabytes, "survivors": receivers - 1, "seconds": seconds}


def memory_needed(megabytes: float, receivers: int) -> float:
    """Gigabytes that a cell may take, all processes together."""
    return megabytes * (COPIES_AT_SENDER + COPIES_AT_RECEIVER * receivers) / 1000 + 0.3 * receivers
