"""The benchmark's Ray actors (Sending, Receiving) and, in the caller's process, the endpoints that call them.

By the object store a payload moves as in a training run: the sending actor returns it as an object of Ray's store, and
every receiving actor is given the reference.
"""

import asyncio
import os
import time
from datetime import timedelta
from operator import attrgetter
from typing import Any

import psutil
import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayActorError
from torch._C._distributed_c10d import PrefixStore, TCPStore

from checkpoint_engine.base import RING, Header
from checkpoint_engine.collective import CollectiveReceiver, CollectiveSender
from checkpoint_engine.digest import ByteArray
from checkpoint_engine.layout import Layout
from checkpoint_engine.process_group import SENDER, Epoch, TorchLink
from checkpoint_engine.publisher import Publisher
from checkpoint_engine.receiver import Receiver
from checkpoint_engine.transports import GLOO, NCCL, OBJECT_STORE, PYNCCL

TENSORS = 32
"""Number of tensors of a payload, each of the same size."""
GROUP_SECONDS = 120.0
"""Time limit of the bare broadcast's store and process group."""
ON_GPUS = (NCCL, PYNCCL)
"""Transports whose members each need a GPU."""
MAIN, DELIVERY, CONTROL = "main", "delivery", "control"
"""Concurrency groups of an actor, one thread each: its own work, deliveries, and aborts (while a delivery blocks)."""


class Side:
    """What both actors have: the payload's tensors, and the bare transfers, with which a delivery is compared.

    The payload is `megabytes` (10^6 bytes) of float32 in 32 tensors, on a GPU if the transport is in ON_GPUS. A bare
    transfer moves a second buffer of that size (`_scratch`) and verifies nothing.
    """

    def __init__(self, transport: str, megabytes: float) -> None:
        torch.set_num_threads(1)
        self._device = "cuda" if transport in ON_GPUS else "cpu"
        one = torch.empty(int(megabytes * 1e6) // (4 * TENSORS), device="meta")
        layout = Layout.of({f"t{i:02d}": one for i in range(TENSORS)})
        self._payload, self._scratch = (layout.empty(self._device).zero_() for _ in range(2))
        self.tensors = layout.views(self._payload)

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method, or a method of an attribute (`publisher.seal`), and returns its result."""
        return attrgetter(method)(self)(*arguments)

    def pid(self) -> int:
        return os.getpid()

    def bytes_sent(self) -> int:
        """Returns the bytes that this node has sent so far by all network interfaces except loopback."""
        counted = psutil.net_io_counters(pernic=True)
        return sum(each.bytes_sent for name, each in counted.items() if name != "lo")

    def copy(self) -> float:
        """Copies the payload to the second buffer and returns the seconds."""
        began = time.perf_counter()
        self._scratch.copy_(self._payload)
        return self._seconds_since(began)

    def open(self, host: str, port: int, world: int, rank: int) -> None:
        """Opens a torch process group for `broadcast`, in addition to the transport's own: NCCL on GPUs, else gloo."""
        store = TCPStore(host, port, None, False, timedelta(seconds=GROUP_SECONDS), wait_for_workers=False)
        self._link = TorchLink(NCCL if self._device == "cuda" else GLOO)
        self._link.open(PrefixStore("raw", store), Epoch("gloo", 0, "raw", host, port, world, GROUP_SECONDS), rank)

    def broadcast(self) -> None:
        """Runs the bare collective: one broadcast of all bytes."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER, 0
        self._link.group.broadcast([self._scratch], options).wait()
        self._seconds_since(0.0)

    def _seconds_since(self, began: float) -> float:
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began


class Sending(Side):
    """The trainer's side: a publisher."""

    def __init__(self, transport: str, megabytes: float) -> None:
        super().__init__(transport, megabytes)
        self.publisher = Publisher(self.tensors, retain=1)
        if transport != OBJECT_STORE:
            self.group = CollectiveSender(self.publisher, self._device)

    def train(self, version: int) -> None:
        """Stands for a training step: fills the tensors, and the second buffer, with the version's number."""
        for tensor in self.tensors.values():
            tensor.fill_(float(version))
        self.copy()

    def put(self) -> ByteArray:
        """First part of the bare transfer by the object store: Ray puts the returned array there."""
        return self._scratch.numpy()


class Receiving(Side):
    """A rollout worker's side: a receiver."""

    def __init__(self, transport: str, megabytes: float) -> None:
        super().__init__(transport, megabytes)
        self.receiver = Receiver(self.tensors, capacity=1)
        self._payload = self.receiver.live  # instead of a third buffer
        if transport != OBJECT_STORE:
            self.group = CollectiveReceiver(self.receiver, self._device)

    def get(self, data: ByteArray) -> None:
        """Second part of the bare transfer by the object store: copies the array, which Ray maps from there."""
        self._scratch.numpy()[:] = data

    def activate(self, version: int) -> float:
        """Activates a version and returns the seconds."""
        began = time.perf_counter()
        self.receiver.activate("policy", version)
        return self._seconds_since(began)


def remote(method: str, lane: str = DELIVERY) -> Any:
    """Returns a coroutine method of an endpoint, which calls a method of its actor on a lane."""

    async def called(end: "End", *arguments: Any) -> Any:
        return await end.call(method, *arguments, lane=lane)

    return called


class End:
    """Endpoint of an actor: creates it and calls its methods."""

    def __init__(self, side: type[Side], name: str, transport: str, megabytes: float, node: str = "") -> None:
        """`node`: the address of the node that the actor is to be on; empty leaves that to Ray."""
        self.name, self.node = name, node or "local"
        create = ray.remote(concurrency_groups=dict.fromkeys((MAIN, DELIVERY, CONTROL), 1))(side)
        gpus = 1 if transport in ON_GPUS else 0
        seat = {f"node:{node}": 0.001} if node else {}
        self._actor = create.options(num_cpus=0, num_gpus=gpus, resources=seat).remote(transport, megabytes)

    def start(self, method: str, *arguments: Any, lane: str = MAIN, returns: int = 1) -> Any:
        """Starts a call; returns a reference to its result, or `returns` references."""
        call = self._actor.call.options(concurrency_group=lane, num_returns=returns)
        return call.remote(method, *arguments)

    async def call(self, method: str, *arguments: Any, lane: str = MAIN) -> Any:
        """Returns the result of a call. Raises the method's error, or ConnectionResetError if the process has died."""
        try:
            return await self.start(method, *arguments, lane=lane)
        except RayActorError as error:
            raise ConnectionResetError(f"{self.name} is gone") from error

    open_group, ready, abort_group = remote("group.open"), remote("group.ready"), remote("group.abort", CONTROL)

    async def close(self) -> None:
        """Ends the actor and waits until Ray knows that it has ended."""
        ray.kill(self._actor)
        await asyncio.gather(self.call("pid"), return_exceptions=True)

    async def _payload(self, method: str, *arguments: Any) -> Any:
        """Returns a reference to the second of two results, header and bytes, of a method that has ended."""
        header, payload = self.start(method, *arguments, lane=DELIVERY, returns=2)
        await header
        return payload


class SenderEnd(End):
    """The sending actor as a SenderEndpoint."""

    stage, seal = remote("publisher.stage", MAIN), remote("publisher.seal")
    hold, release = remote("publisher.hold"), remote("publisher.release")
    draft, send = remote("publisher.draft"), remote("group.send")

    async def payload(self, version: int) -> Any:
        return await self._payload("publisher.payload", version)

    async def address(self) -> Any:
        host, port = await self.call("group.address", lane=DELIVERY)
        return (host if self.node == "local" else self.node), port


class ReceiverEnd(End):
    """A receiving actor as a ReceiverEndpoint."""

    receive, accept = remote("receiver.receive"), remote("group.accept")

    async def relay(self, header: Header, slot: str = RING) -> Any:
        return await self._payload("receiver.export", header.stream, header.version, slot)
