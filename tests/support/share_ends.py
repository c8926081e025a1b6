"""Both ends of a delivery of shares, as objects for ProcessPool, which die within a bucket where a test says."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor

from async_flowrl.types import POLICY, ByteArray
from checkpoint_engine import Ack, Header, Layout, Publisher, Receiver, ShardedHeader, ShardReceiver
from checkpoint_engine.layout import RunningDigests
from checkpoint_engine.shards import shard_rows
from tests.support.process_pool import die

SHAPES = {"blocks.0.weight": (7, 24), "blocks.0.norm": (3,), "blocks.1.weight": (7, 24), "proj": (1, 500)}
"""Two of one shape, and rows that two ranks cannot share evenly, or of which one has none."""


def weights(version: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def share(tensors: Mapping[str, Tensor], ranks: int, rank: int) -> dict[str, Tensor]:
    rows = {name: shard_rows(len(tensor), ranks, rank) for name, tensor in tensors.items()}
    return {name: tensor[rows[name].start : rows[name].stop].clone() for name, tensor in tensors.items()}


@dataclass
class Death:
    """Place at which a process dies: a version, and in it a bucket of which half is done."""

    version: int
    bucket: int
    """Number of the bucket among those that this process sends, or takes, of the version."""
    on_the_wire: bool = False
    """A sender dies when half of the bucket is written to its pipe, not when half of it is digested."""
    seen: int = 0

    def is_here(self, version: int) -> bool:
        """Whether the bucket that comes next is the one; counts the version's buckets."""
        if version != self.version:
            return False
        self.seen += 1
        return self.seen == self.bucket + 1


@contextmanager
def halted(size: int, halt: Callable[[], NoReturn]) -> Iterator[None]:
    """Calls `halt`, which ends the process or raises, when `size` further bytes have been digested, not one more.

    Padding that is passed over counts, too.
    """
    left, feed, skip_to = size, RunningDigests.feed, RunningDigests.skip_to

    def counted(self: RunningDigests, data: ByteArray) -> None:
        nonlocal left
        if len(data) >= left:
            feed(self, data[:left])
            halt()
        left -= len(data)
        feed(self, data)

    def skipped(self: RunningDigests, end: int) -> None:
        nonlocal left
        if end - self.end >= left:
            skip_to(self, self.end + left)
            halt()
        left -= max(0, end - self.end)
        skip_to(self, end)

    with mock.patch.object(RunningDigests, "feed", counted), mock.patch.object(RunningDigests, "skip_to", skipped):
        yield


def die_in_the_next_answer() -> None:
    """Has this process die when half of its next message is in the pipe."""

    def write(connection: Connection, message: bytes) -> NoReturn:
        os.write(connection.fileno(), message[: len(message) // 2])
        die()

    Connection._send = write  # type: ignore[attr-defined]


class ShareSender:
    """A trainer rank, as far as its share of the weights is concerned."""

    def __init__(self, index: int, name: str, ranks: int, dies_at: Mapping[str, Death]) -> None:
        """`dies_at`: name of a rank → where its process ends."""
        self._index, self._ranks, self._death = index, ranks, dies_at.get(name)
        self.policy = Publisher(share(weights(0), ranks, index), POLICY)
        self.sender = SimpleNamespace(
            stage=self.stage,
            whole_layout=lambda: Layout.of(weights(0)),
            policy=SimpleNamespace(
                seal=self.policy.seal,
                piece=self.piece,
                hold=self.policy.hold,
                release=self.policy.release,
            ),
        )

    def stage(self, version: int, stream: str) -> None:
        self.policy.stage(version, share(weights(version), self._ranks, self._index))

    def piece(self, version: int, start: int, size: int) -> tuple[Header | None, ByteArray]:
        if self._death is None or not self._death.is_here(version):
            return self.policy.piece(version, start, size)
        if self._death.on_the_wire:
            die_in_the_next_answer()
            return self.policy.piece(version, start, size)
        with halted(min(size, self.policy.layout.nbytes - start) // 2, die):
            return self.policy.piece(version, start, size)


class DyingShares(ShardReceiver):
    death: Death | None = None

    def take(self, version: int, shard: int, start: int, data: ByteArray) -> None:
        if self.death is None or not self.death.is_here(version):
            return super().take(version, shard, start, data)
        with halted(len(data) // 2, die):
            return super().take(version, shard, start, data)


class ShareReceiver:
    """A rollout worker, as far as its weights are concerned."""

    def __init__(self, index: int, name: str, dies_at: Mapping[str, Death]) -> None:
        """`dies_at`: name of a worker → where its process ends."""
        self.live = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.receiver = Receiver(self.live, capacity=2)
        self.shards = DyingShares(self.receiver)
        self.shards.death = dies_at.get(name)

    def serve(self, version: int) -> tuple[str, str, dict[str, Tensor]]:
        """Activates a version; returns its digest, the live bytes', and the live tensors."""
        digest = self.receiver.activate(POLICY, version)
        return digest, self.receiver.live_digest(), self.live

    def held(self) -> Any:
        return self.receiver.held()


def received(receiver: ShardReceiver, header: ShardedHeader, senders: list[Publisher], bucket: int) -> Ack:
    """Takes a version from publishers of this process, in buckets."""
    receiver.begin(header, len(senders))
    for shard, sender in enumerate(senders):
        _, data = sender.payload(header.version)
        for start in range(0, len(data), bucket):
            receiver.take(header.version, shard, start, sender.piece(header.version, start, bucket)[1])
    return receiver.finish(header)
