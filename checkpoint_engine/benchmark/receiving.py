"""A receiving process of the benchmark: the engine's end, and the raw primitives on the same bytes."""

import contextlib
import multiprocessing
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from checkpoint_engine.object_store import SharedMemoryStore
from checkpoint_engine.process_group import gloo_group
from checkpoint_engine.receiver import Receiver
from checkpoint_engine.transports import member_for
from examples.checkpoint_engine.processes import ProcessReceiver, serve

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["checkpoint_engine.benchmark.measure"])
TENSORS = 32
LIMIT = timedelta(seconds=120)


def tensors_of(megabytes: float) -> dict[str, Tensor]:
    """So many megabytes (10^6 bytes) of float32 [n], in 32 tensors."""
    each = int(megabytes * 1e6) // (4 * TENSORS)
    return {f"t{i:02d}": torch.ones(each) for i in range(TENSORS)}


class Bare:
    """One process's part in a bare broadcast: the engine's kind of group, all bytes in one call, nothing verified."""

    def __init__(self, port: int, rank: int, world: int, server: TCPStore | None = None) -> None:
        self._store = server or TCPStore("127.0.0.1", port, None, False, LIMIT, wait_for_workers=False)
        self._group = gloo_group(PrefixStore("bare", self._store), rank, world, LIMIT)

    def broadcast(self, buffer: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([buffer], options).wait()


class Orders:
    """What the benchmark may ask of a receiving process. Each answer is in seconds."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._store = SharedMemoryStore()
        self._bare: Bare | None = None

    def copy(self) -> float:
        """Of a copy of the whole payload, as bare as it gets."""
        return memcpy(self._scratch, self._receiver._live)

    def activate(self, version: int) -> float:
        began = time.perf_counter()
        self._receiver.activate("policy", version)
        return time.perf_counter() - began

    @property
    def _scratch(self) -> Tensor:
        """The receiver's slot for the next version, which is free between two deliveries."""
        if not self._receiver._spare:
            self._receiver._spare.append(self._receiver.layout.empty().zero_())
        return self._receiver._spare[-1]

    def get(self, reference: str) -> float:
        """Out of a mapping that stays, as those of the engine's receiver do."""
        began = time.perf_counter()
        self._scratch.numpy()[:] = self._store.get(reference)
        return time.perf_counter() - began

    def open(self, port: int, rank: int, world: int) -> float:
        self._bare = Bare(port, rank, world)
        return 0.0

    def broadcast(self) -> float:
        if self._bare is None:
            raise RuntimeError("broadcast was asked for before open")
        began = time.perf_counter()
        self._bare.broadcast(self._scratch)
        return time.perf_counter() - began


def memcpy(target: Tensor, source: Tensor) -> float:
    """Seconds of one copy between buffers that have been touched before."""
    began = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - began


def receiving(connection: Connection, orders: Connection, transport: str, megabytes: float) -> None:
    """The process: serves the engine from threads and answers orders until the other side hangs up."""
    torch.set_num_threads(1)
    receiver = Receiver(tensors_of(megabytes), capacity=1)
    answers = Orders(receiver)
    with serve(connection, receiver, member=member_for(transport)), contextlib.suppress(EOFError):
        while True:
            order, *arguments = orders.recv()
            orders.send(getattr(answers, order)(*arguments))


class Process:
    """One receiving process, from the benchmark's side."""

    def __init__(self, name: str, transport: str, megabytes: float) -> None:
        ours, theirs = CONTEXT.Pipe()
        self._orders, orders = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=receiving, args=(theirs, orders, transport, megabytes), daemon=True)
        self._process.start()
        theirs.close()
        orders.close()
        self.end = ProcessReceiver(ours, name)

    def order(self, *order: Any) -> None:
        self._orders.send(order)

    def answer(self) -> Any:
        return self._orders.recv()

    def kill(self) -> None:
        """At any time; one that is dead already is left alone."""
        self._process.kill()

    def close(self) -> None:
        self.kill()
        self._process.join()
        self.end.close()


def ask(processes: Sequence[Process], *order: Any) -> list[Any]:
    """All processes at once; their answers in order."""
    for process in processes:
        process.order(*order)
    return [process.answer() for process in processes]
