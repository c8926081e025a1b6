"""Tests of the memory from which versions are sent: staged slots, copies to the host, and streams that do not wait."""

import threading
from collections.abc import Callable

import pytest
import torch

from checkpoint_engine import Publisher, Receiver
from checkpoint_engine.collective import CollectiveSender
from checkpoint_engine.errors import TransferFailed
from checkpoint_engine.side_stream import HostCopy, PinnedBlocks, SideStream
from tests.gpu.member_tensors import alone, on_pretended, tensors
from tests.support.live import live_digest

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def opened(transport: str, publisher: Publisher) -> CollectiveSender:
    """A sender that is the only member of its group."""
    sender = CollectiveSender(publisher, "cuda")
    sender.open(alone(transport, sender))
    return sender


def test_a_slot_is_not_staged_into_while_its_last_buckets_are_under_way(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = Publisher(tensors(1000))
    sender = opened(transport, publisher)
    broadcast = sender.broadcast

    def staging_behind(buffer: torch.Tensor, seen: Callable[[int], None], behind: Callable[[], torch.Tensor]) -> None:
        def then_stage() -> torch.Tensor:
            digests = behind()
            with pytest.raises(TransferFailed, match=r"staging version 2 waited 0 s for \[1\] to be sealed"):
                publisher.stage(2, deadline=0.0)
            return digests

        broadcast(buffer, seen, then_stage)

    monkeypatch.setattr(sender, "broadcast", staging_behind)
    publisher.stage(0)
    publisher.stage(1)
    sender.send(publisher.draft(0))
    publisher.stage(2, deadline=0.0)
    assert publisher.retained() == (0,)
    sender.abort()


def test_a_slot_is_free_again_after_a_broadcast_that_failed(transport: str) -> None:
    publisher = Publisher(tensors(1000))
    sender = opened(transport, publisher)
    for version in range(4):
        publisher.stage(version, deadline=0.0)
        sender.abort()
        with pytest.raises(TransferFailed, match="before the members were ready"):
            sender.send(publisher.draft(version))
        assert version in publisher.retained(), "it goes another way"


def test_a_copy_to_the_host_that_is_dropped_has_ended_before_its_memory_is_used_again() -> None:
    there = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    host = torch.zeros(64 << 20, dtype=torch.uint8, pin_memory=True)
    copy = HostCopy(there, host, SideStream(torch.device("cuda", 0)))
    del copy
    host.fill_(2)
    torch.cuda.synchronize()
    assert host.eq(2).all()


def test_copies_by_pinned_blocks_are_the_bytes_in_their_order() -> None:
    side = SideStream(torch.device("cuda", 0))
    size = 3 * (4 << 20) + 1001
    with side.current():
        there = torch.empty(size, dtype=torch.uint8, device="cuda")
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)).numpy()
    blocks = PinnedBlocks(side)
    for start in range(0, size, 4 << 20):
        part = data[start : start + (4 << 20)]
        assert bytes(blocks.upload(part, there[start : start + part.shape[0]])) == bytes(part)
    assert b"".join(bytes(block) for block in blocks.download(there)) == bytes(data)
    blocks.settle()
    assert torch.equal(there.cpu(), torch.from_numpy(data))


@pytest.mark.parametrize("on_host", [False, True], ids=["ring on the device", "ring in pinned memory"])
def test_a_slot_is_not_written_while_an_activation_reads_it(on_host: bool) -> None:
    """Within a device, the copy into the live tensors is only queued when `activate` returns.

    A pretended device reports a race, also with the host.
    """
    publisher = Publisher(tensors(1000), retain=6)
    for version in range(6):
        publisher.stage(version)
        publisher.seal(version)
    receiver = Receiver(tensors(1000, fill=0.0), capacity=1, on_host=on_host)
    for version in range(6):
        received = threading.Thread(target=receiver.receive, args=publisher.payload(version))
        received.start()
        received.join()
        digest = receiver.activate("policy", version)
    assert live_digest(receiver) == digest == publisher.payload(5)[0].digest
    kept = [storage for _, storage in receiver.retained.values()]
    assert all(storage.is_pinned() if on_host else storage.is_cuda for storage in kept)


@on_pretended
def test_a_delivery_does_not_wait_for_what_others_have_queued(transport: str) -> None:
    """Behind a denoising loop or an update, a copy on the default stream would begin when that has ended."""
    from pretended import report

    publisher = Publisher(tensors(1000))
    sender = opened(transport, publisher)
    receiver = Receiver(tensors(1000, fill=0.0))
    work = torch.ones(8, device="cuda")
    publisher.stage(0)
    with report.watched(report.BEHIND) as behind:
        for step in (lambda: sender.send(publisher.draft(0)), lambda: receiver.receive(*publisher.payload(0))):
            work.add_(1.0)  # queued by this thread, and nobody has waited for it
            lane = threading.Thread(target=step)
            lane.start()
            lane.join()
    assert not behind and receiver.held() == (("policy", 0, "ring"),)
    sender.abort()
