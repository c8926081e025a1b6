"""Both ends of a delivery in shares, as the benchmark (shares.py) starts them in processes: bytes, and no model."""

import time
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from async_flowrl.types import POLICY, ByteArray
from checkpoint_engine import Layout, Publisher, Receiver, ShardReceiver
from checkpoint_engine.process_group import Epoch, TorchLink
from checkpoint_engine.shards import shard_layout
from checkpoint_engine.transports import GLOO

TENSORS = 64
GROUP_SECONDS = 300.0


def whole_layout(megabytes: float) -> Layout:
    """Returns the layout of `megabytes` (10^6 bytes) of bfloat16 in TENSORS matrices, on no device."""
    columns = 256
    rows = int(megabytes * 1e6) // (2 * TENSORS * columns)
    like = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
    return Layout.of({f"t{index:02d}": like for index in range(TENSORS)})


class End:
    """A process with a buffer, of which the bare transfers send or into which they write.

    A receiver's buffer has room for all shares, a rank's for one, into which gloo writes the other ranks' shares, too.
    """

    def __init__(self, buffer: torch.Tensor, *, of_all: bool) -> None:
        self.buffer, self._of_all = buffer, of_all
        self._link: TorchLink

    def place(self, sizes: list[int], shard: int) -> int:
        """Returns the byte of the buffer at which a share begins; `sizes` are those of all shares in bytes."""
        return sum(sizes[:shard]) if self._of_all else 0

    def serve(self) -> int:
        """Opens the store in which the members of the gloo group meet; returns its port."""
        self._server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=GROUP_SECONDS), wait_for_workers=False)
        return int(self._server.port)

    def open(self, host: str, port: int, world: int, rank: int) -> None:
        """Joins the gloo group of all ranks and receivers."""
        store = TCPStore(host, port, None, False, timedelta(seconds=GROUP_SECONDS), wait_for_workers=False)
        self._link = TorchLink(GLOO)
        self._link.open(PrefixStore("raw", store), Epoch(0, "raw", host, port, world, GROUP_SECONDS), rank)

    def broadcast(self, sizes: list[int], bucket: int) -> None:
        """Takes part in bare broadcasts of all ranks' shares, which have these sizes in bytes, bucket by bucket."""
        options = dist.BroadcastOptions()
        options.rootTensor = 0
        for rank, size in enumerate(sizes):
            options.rootRank = rank
            begin = self.place(sizes, rank)
            for start in range(0, size, bucket):
                piece = self.buffer[begin + start : begin + min(start + bucket, size)]
                self._link.group.broadcast([piece], options).wait()


class SendingRank(End):
    """A trainer rank's share of the weights, with a publisher; tests.support.share_ends has one for tests."""

    def __init__(self, index: int, name: str, ranks: int, megabytes: float) -> None:
        whole = whole_layout(megabytes)
        largest = shard_layout(whole, ranks, 0)
        super().__init__(largest.empty().zero_(), of_all=False)
        own = shard_layout(whole, ranks, index)
        self._live, self._nbytes = own.views(self.buffer), own.nbytes
        publisher = Publisher(self._live, POLICY, retain=1)
        self.sender = SimpleNamespace(policy=publisher, stage=self.stage)
        self._staging = 0.0

    def train(self, version: int) -> None:
        self.buffer.fill_(version % 251)

    def stage(self, version: int, stream: str) -> None:
        began = time.perf_counter()
        self.sender.policy.stage(version)
        self._staging = time.perf_counter() - began

    def stalled(self) -> tuple[float, float]:
        """Returns the seconds of the last staging, and of one bare copy of the same tensors into host memory."""
        target = self.sender.policy._buffers.take()
        began = time.perf_counter()
        torch._foreach_copy_(target.views, list(self._live.values()))
        return self._staging, time.perf_counter() - began

    def raw(self, version: int, start: int, size: int) -> tuple[None, ByteArray]:
        return None, self.buffer[start : min(start + size, self._nbytes)].numpy()


class TakingWorker(End):
    """A rollout worker's receiver."""

    def __init__(self, index: int, name: str, megabytes: float) -> None:
        layout = whole_layout(megabytes)
        live = layout.views(layout.empty().zero_())
        self.receiver = Receiver(live, capacity=1, on_host=True)
        self.shards = ShardReceiver(self.receiver)
        super().__init__(self.receiver._live, of_all=True)

    def take_raw(self, sizes: list[int], shard: int, start: int, data: ByteArray) -> None:
        """The bare primitive: copies the bytes of a bucket, which Ray has mapped, to where its share lies here."""
        place = self.place(sizes, shard) + start
        self.buffer[place : place + data.shape[0]].numpy()[:] = data

    def activate(self, version: int) -> float:
        """Returns the seconds of the activation of a version."""
        began = time.perf_counter()
        self.receiver.activate(POLICY, version)
        return time.perf_counter() - began
