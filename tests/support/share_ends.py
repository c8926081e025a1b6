"""Both ends of a delivery of shares, as objects for ProcessPool, which die where a test says."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from async_flowrl.types import POLICY, ByteArray
from checkpoint_engine import Ack, Header, Layout, Publisher, Receiver, ShardedHeader, ShardReceiver
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


class ShareSender:
    """A trainer rank, as far as its share of the weights is concerned."""

    def __init__(self, index: int, name: str, ranks: int, dies_at: Mapping[str, tuple[int, int]]) -> None:
        """`dies_at`: name of a rank → version, and the number of its bucket in which the process ends."""
        self._index, self._ranks, self._dies_at, self._sent = index, ranks, dies_at.get(name), 0
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
        if self._dies_at is not None and version == self._dies_at[0]:
            if self._sent == self._dies_at[1]:
                die()
            self._sent += 1
        return self.policy.piece(version, start, size)


class DyingShares(ShardReceiver):
    dies_at: tuple[int, int] | None = None
    taken = 0

    def take(self, version: int, shard: int, start: int, data: ByteArray) -> None:
        if self.dies_at is not None and version == self.dies_at[0]:
            if self.taken == self.dies_at[1]:
                die()
            self.taken += 1
        super().take(version, shard, start, data)


class ShareReceiver:
    """A rollout worker, as far as its weights are concerned."""

    def __init__(self, index: int, name: str, dies_at: Mapping[str, tuple[int, int]]) -> None:
        """`dies_at`: name of a worker → version, and the number of its bucket in which the process ends."""
        self.live = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.receiver = Receiver(self.live, capacity=2)
        self.shards = DyingShares(self.receiver)
        self.shards.dies_at = dies_at.get(name)

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
