"""Weights in shares on GPUs: sent while they are digested, and received on the device or in pinned memory."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from checkpoint_engine import Draft, Layout, Publisher, Receiver, ShardedHeader, ShardReceiver
from checkpoint_engine.digest import ByteArray
from tests.support.share_ends import SHAPES, share, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RANKS, BUCKET, VERSIONS = 2, 300, 4
Sent = tuple[Draft, list[tuple[int, int, ByteArray]], ShardedHeader]
"""Draft, buckets (shard, first byte, bytes), and the header, which is made when all buckets are sent."""


def on_gpu(version: int, rank: int) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in share(weights(version), RANKS, rank).items()}


def send(senders: list[Publisher], version: int, layout: Layout) -> Sent:
    buckets: list[tuple[int, int, ByteArray]] = []
    for rank, sender in enumerate(senders):
        sender.stage(version, on_gpu(version, rank))
        starts = range(0, sender.layout.nbytes, BUCKET)
        buckets += [(rank, start, np.copy(sender.piece(version, start, BUCKET)[1])) for start in starts]
    header = ShardedHeader.of(layout, [sender.seal(version) for sender in senders])
    return replace(senders[0].draft(version), layout=layout), buckets, header


@pytest.mark.parametrize("on_host", [False, True], ids=["ring on the device", "ring in pinned memory"])
def test_shares_are_sent_before_they_are_sealed_and_no_place_is_written_while_it_is_read(on_host: bool) -> None:
    """The delivery has a thread of its own. A pretended device reports a race, also with the host."""
    layout = Layout.of(weights(0))
    senders = [Publisher(on_gpu(0, rank)) for rank in range(RANKS)]
    sent = [send(senders, version, layout) for version in range(VERSIONS)]
    live = {name: torch.zeros(shape, device="cuda") for name, shape in SHAPES.items()}
    receiver = Receiver(live, capacity=1, on_host=on_host)
    taking = ShardReceiver(receiver)

    def deliver(draft: Draft, buckets: list[tuple[int, int, ByteArray]], header: ShardedHeader) -> None:
        taking.begin(draft, RANKS)
        for shard, start, data in buckets:
            taking.take(draft.version, shard, start, data)
        taking.finish(header)

    for version in range(VERSIONS):
        delivery = threading.Thread(target=deliver, args=sent[version])
        delivery.start()
        delivery.join()
        digest = receiver.activate("policy", version)
        assert digest == receiver.activate("policy", version) == sent[version][2].digest
    assert receiver.live_digest() == digest
    assert all(torch.equal(live[name].cpu(), tensor) for name, tensor in weights(VERSIONS - 1).items())
    assert all(place.is_pinned() if on_host else place.is_cuda for _, place in receiver._retained.values())
