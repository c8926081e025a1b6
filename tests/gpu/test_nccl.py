"""Tests on one GPU of both NCCL links with one rank, and of a flat buffer under a captured CUDA graph."""

import pytest
import torch

from checkpoint_engine import Publisher, Receiver
from checkpoint_engine.collective import CollectiveSender
from checkpoint_engine.errors import TransferCorrupted, TransferFailed
from checkpoint_engine.process_group import Epoch
from checkpoint_engine.side_stream import on
from tests.gpu.member_tensors import alone, deliver, tensors
from tests.support.live import live_digest

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROWS = 650
"""Of each tensor: a megabyte together."""


def test_open_broadcast_abort_and_open_again(transport: str) -> None:
    publisher = Publisher(tensors(ROWS))
    sender = CollectiveSender(publisher, "cuda")
    for version in range(3):
        publisher.stage(version)
        header = publisher.seal(version)
        sender.open(alone(transport, sender, version))
        sender.ready(version, header)
        sender.send(header)
        sender.abort()
        with pytest.raises(TransferFailed, match="before the members were ready"):
            sender.send(header)
    sender.abort()


def test_a_broadcast_sends_the_staged_bytes_and_seals_them_meanwhile(transport: str) -> None:
    source = tensors(ROWS)
    publisher = Publisher(source)
    publisher.stage(0)
    for tensor in source.values():
        tensor.zero_()
    sender = CollectiveSender(publisher, "cuda")
    sender.open(alone(transport, sender, 0))
    sender.ready(0, publisher.draft(0))
    sender.send(publisher.draft(0))
    header, data = publisher.payload(0)
    assert header == publisher.draft(0).sealed(publisher.layout.digests(data))
    sender.abort()


def test_bytes_that_arrive_on_the_device_are_digested_bucket_by_bucket_and_kept() -> None:
    publisher = Publisher(tensors(ROWS))
    publisher.stage(0)
    header = publisher.seal(0)
    receiver = Receiver(tensors(ROWS, fill=0.0))
    intake = receiver.expect(publisher.draft(0))
    with on(intake.side):  # as a transport does
        intake.storage.copy_(torch.from_numpy(publisher.payload(0)[1].copy()))
    for end in (1000, 300_000, header.nbytes):
        intake.arrived(end)
    assert intake.accept(header).digest == header.digest
    assert receiver.activate("policy", 0) == live_digest(receiver) == header.digest
    damaged = receiver.expect(publisher.draft(0))
    with on(damaged.side):
        damaged.storage.copy_(intake.storage)
        damaged.storage[5] ^= 1
    damaged.arrived(header.nbytes)
    with pytest.raises(TransferCorrupted, match="wrong bytes in m0"):
        damaged.accept(header)


def test_a_missing_peer_ends_in_an_error_within_the_deadline(transport: str) -> None:
    sender = CollectiveSender(Publisher(tensors(ROWS)), "cuda")
    with pytest.raises(TransferFailed, match="epoch 0 could not be opened as rank 0"):
        sender.open(Epoch(transport, 0, "secret", *sender.address(), 2, 3.0))


def test_staging_on_the_device_is_ordered_before_what_changes_the_weights() -> None:
    deliver(42_000)


@pytest.mark.real_gpu
def test_activation_under_a_captured_graph() -> None:
    """Replaying the graph after an activation computes with the new weights: addresses never changed."""
    source = tensors(ROWS)
    publisher = Publisher(source)
    live = {name: torch.nn.Parameter(torch.zeros_like(tensor)) for name, tensor in source.items()}
    receiver = Receiver(live)
    x, out = torch.ones(64, device="cuda"), torch.empty(source["m3"].shape[0], device="cuda")
    for version in range(2):
        publisher.stage(version)
        publisher.seal(version)
        receiver.receive(*publisher.payload(version))
        for tensor in source.values():
            tensor.mul_(-3.0)
    with torch.no_grad():
        torch.mv(live["m3"], x, out=out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.mv(live["m3"], x, out=out)
    for version in (0, 1, 0):
        digest = receiver.activate("policy", version)
        assert digest == publisher.payload(version)[0].digest == live_digest(receiver)
        graph.replay()
        torch.cuda.synchronize()
        expected = publisher.layout.views(torch.from_numpy(publisher.payload(version)[1]))["m3"].cuda()
        assert torch.equal(out, torch.mv(expected, x))
