"""Receivers in processes of their own, which die where a test says, and their owners' view of them."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from checkpoint_engine import Delivery, DeliveryOptions, Publisher, Receiver
from checkpoint_engine import process_group as links_module
from checkpoint_engine.collective import CollectiveReceiver
from checkpoint_engine.collective_delivery import CollectiveBroadcast
from checkpoint_engine.process_group import Epoch, Limit, TorchLink
from examples.checkpoint_engine.piped_processes import Channel, ProcessReceiver, ProcessSender, channel, serve
from tests.support.forked import CONTEXT
from tests.support.live import live_digest
from tests.unit.checkpoint_engine.engine_parts import ALPHA, PATIENCE, RANK, lora

BUCKET_BYTES = 4096
SECONDS = 240.0
"""Nothing here may take longer; it takes a few."""


class FaultyLink(TorchLink):
    """A gloo link whose process dies, or falls silent: when it opens its second epoch, or in its second broadcast."""

    opened = 0
    broadcasts = 0

    def __init__(self, fault: str) -> None:
        super().__init__("gloo")
        self.fault = fault

    def open(self, store: Store, epoch: Epoch, rank: int) -> None:
        FaultyLink.opened += 1
        self._end_if("opening", FaultyLink.opened == 2)
        super().open(store, epoch, rank)

    def broadcast(
        self, buffer: Tensor, limit: Limit, seen: Callable[[int], None], behind: Callable[[], Tensor]
    ) -> None:
        FaultyLink.broadcasts += 1
        now = FaultyLink.broadcasts == 2
        self._end_if("before", now)

        def arrived(end: int) -> None:
            self._end_if("between", now and end < buffer.shape[0])
            seen(end)

        super().broadcast(buffer, limit, arrived, behind)
        self._end_if("after", now)

    def _end_if(self, phase: str, now: bool) -> None:
        if now and self.fault.endswith(phase):
            os.kill(os.getpid(), signal.SIGSTOP if self.fault.startswith("silent") else signal.SIGKILL)


def receiving(connections: Channel, results: Connection, transport: str, shape: dict[str, Any], fault: str) -> None:
    """A receiving process: answers deliveries, and questions on `results` as `Child.ask` puts them."""
    torch.set_num_threads(1)
    links_module.BUCKET_BYTES = BUCKET_BYTES
    zeros = {name: torch.zeros_like(tensor) for name, tensor in lora(**shape).items()}
    receiver = Receiver(zeros, alpha=ALPHA, rank=RANK)
    group = None
    if fault or transport != "object_store":
        group = CollectiveReceiver(receiver)
        if fault:
            group.new_link = lambda transport: FaultyLink(fault)  # type: ignore[method-assign]
    with serve(connections, receiver, group=group), contextlib.suppress(EOFError):
        while True:
            results.send(_answer(receiver, *results.recv()))


def _answer(receiver: Receiver, question: str, *arguments: Any) -> Any:
    if question == "weights":
        receiver.activate("policy", arguments[0])
        return {name: tensor.detach().clone() for name, tensor in receiver.tensors.items()}, live_digest(receiver)
    return usage()


def usage() -> dict[str, int]:
    """Threads, file descriptors, sockets and resident kilobytes of this process."""
    fds = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            fds.append(os.readlink(f"/proc/self/fd/{fd}"))
    with open("/proc/self/status", encoding="utf-8") as status:
        fields = dict(line.split(":", 1) for line in status)
    return {
        "threads": int(fields["Threads"]),
        "fds": len(fds),
        "sockets": sum(target.startswith("socket:") for target in fds),
        "kilobytes": int(fields["VmRSS"].split()[0]),
    }


class Child:
    """One receiving process and its endpoint."""

    def __init__(self, name: str, transport: str, shape: dict[str, Any], fault: str) -> None:
        ours, theirs = channel(CONTEXT)
        self._results, results = CONTEXT.Pipe()
        self.process: BaseProcess = CONTEXT.Process(
            target=receiving,
            args=(theirs, results, transport, shape, fault),
            daemon=True,
        )
        self.process.start()
        for connection in (*theirs, results):
            connection.close()
        self.end = ProcessReceiver(ours, name)

    def ask(self, question: str, *arguments: Any) -> Any:
        self._results.send((question, *arguments))
        return self._results.recv()

    async def weights(self, version: int) -> tuple[dict[str, Tensor], str]:
        weights: tuple[dict[str, Tensor], str] = await asyncio.to_thread(self.ask, "weights", version)
        return weights

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._results.close()
        self.end.close()


class Rig:
    """A publisher of this process and receivers in others, over one transport."""

    def __init__(
        self, transport: str, *, retries: int = 3, deadline: float = 120.0, patience: float = PATIENCE, **shape: Any
    ) -> None:
        self.transport, self.shape = transport, shape
        self.tensors = lora(**shape)
        self.publisher = Publisher(self.tensors, alpha=ALPHA, rank=RANK)
        self.sender = ProcessSender(self.publisher, transport)
        self.broadcast = None
        if transport != "object_store":
            self.broadcast = CollectiveBroadcast(
                self.sender, name=transport, setup_seconds=patience, ready_seconds=patience
            )
        self.children: dict[str, Child] = {}
        self.replaced: list[tuple[str, str]] = []
        self.delivery = Delivery(
            self.sender,
            replace=self.replace,
            options=DeliveryOptions(retries=retries, deadline=deadline),
            broadcast=self.broadcast,
        )

    async def replace(self, name: str, error: BaseException) -> None:
        self.replaced.append((name, type(error).__name__))

    async def join(self, name: str, *, fault: str = "") -> Child:
        child = self.children[name] = Child(name, self.transport, self.shape, fault)
        await asyncio.to_thread(child.ask, "usage")
        assert await self.delivery.join(child.end, self.publisher.retained()[-1:])
        return child

    def train(self) -> None:
        for tensor in self.tensors.values():
            tensor.mul_(1.25).add_(0.5) if tensor.is_floating_point() else tensor.add_(3)

    async def publish(self, version: int) -> None:
        await self.delivery.publish(version)
        await self.delivery.drain()

    async def check(self, *names: str, version: int) -> None:
        """These receivers hold exactly what was published."""
        header, data = self.publisher.payload(version)
        expected = self.publisher.layout.views(torch.from_numpy(data))
        for name in names:
            weights, digest = await self.children[name].weights(version)
            assert digest == header.digest
            assert all(torch.equal(weights[key].view(torch.uint8), expected[key].view(torch.uint8)) for key in expected)

    async def close(self) -> None:
        await self.delivery.close()
        self.sender.close()
        for child in self.children.values():
            child.kill()


@contextlib.asynccontextmanager
async def rig(transport: str, *, names: tuple[str, ...] = (), **options: Any) -> AsyncIterator[Rig]:
    """A rig with receivers, within a limit of time; its processes are gone afterwards."""
    made = Rig(transport, **options)
    try:
        async with asyncio.timeout(SECONDS):
            for name in names:
                await made.join(name)
            yield made
    finally:
        await made.close()
