"""Tests of weights sent over NCCL by torch and by cupy, on one device and between processes with a device each.

Several processes need three devices, real or pretended. What only the pretended device can arrange (a remote error, who
waits for whom on the device) is asked of it alone.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from checkpoint_engine import Publisher, Receiver, WeightsMismatch
from checkpoint_engine.collective import CollectiveReceiver, CollectiveSender
from checkpoint_engine.errors import TransferFailed
from checkpoint_engine.process_group import Epoch
from checkpoint_engine.side_stream import HostCopy, PinnedBlocks, SideStream
from checkpoint_engine.transports import make_member

PRETENDED = "PRETEND_CUDA_DEVICES" in os.environ
DEVICES = 3
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
several = pytest.mark.skipif(
    not PRETENDED and torch.cuda.device_count() < DEVICES, reason=f"needs {DEVICES} CUDA devices"
)
on_pretended = pytest.mark.skipif(not PRETENDED, reason="looks into the pretended device")
SECONDS = 240.0
"""Nothing here may take longer."""
PATIENCE = {"peer dies": 3.0, "peer dies and is noticed": 15.0, "remote error": 3.0}
"""Seconds of a group for a member that does not answer, where that is what happens."""
DEATHS = ("peer dies", "peer dies and is noticed")
"""Modes in which rank 2 dies. Where the others notice it, their limit must not end first, also on a busy machine."""


@pytest.fixture(params=["nccl", "pynccl"])
def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "pynccl":
        pytest.importorskip("cupy")
    return str(request.param)


def tensors(rows: int = 20_000, *, fill: float | None = None) -> dict[str, torch.Tensor]:
    """Six float32 tensors [rows, 64], 31 MB: four buckets."""
    generator = torch.Generator("cuda").manual_seed(0)
    made = {f"m{i}": torch.randn(rows, 64, device="cuda", generator=generator) for i in range(6)}
    return made if fill is None else {name: torch.full_like(tensor, fill) for name, tensor in made.items()}


def test_the_ranks_are_connected_while_the_group_is_made(transport: str) -> None:
    """NCCL connects them in the first collective: it is one of the set-up, under its limit, and no delivery's."""
    sender = CollectiveSender(Publisher(tensors(rows=64)), make_member(transport, "cuda"))
    member, sent = sender._member, []
    made = member._make

    def counting() -> Any:
        link = made()
        own = link.broadcast
        link.broadcast = lambda buffer, *rest: (sent.append(buffer.shape[0]), own(buffer, *rest))  # type: ignore[method-assign]
        return link

    member._make = counting
    sender.open(Epoch(1, "secret", *sender.address(), 1, 60.0, 60.0))
    assert sent == [1]
    sender.close()


def rank_of(number: int, transport: str, mode: str, ours: Connection) -> None:
    """One process: rank 0 sends. It reports what it got, or why not."""
    try:
        _sending(transport, mode, ours) if number == 0 else _receiving(number, transport, mode, ours)
    except TransferFailed as error:
        ours.send(f"TransferFailed: {error}")
    ours.send(None)


def _sending(transport: str, mode: str, ours: Connection) -> None:
    publisher = Publisher(tensors())
    sender = CollectiveSender(publisher, make_member(transport, "cuda"))
    epoch = Epoch(1, "secret", *sender.address(), DEVICES, PATIENCE.get(mode, 60.0), 60.0)
    ours.send(epoch)
    publisher.stage(0)
    sender.open(epoch)
    assert ours.poll(SECONDS) and ours.recv() == "all ready"
    if mode == "late sender":
        time.sleep(0.5)
    sender.send(publisher.draft(0))
    ours.send(publisher.payload(0)[0].digest)


def _receiving(number: int, transport: str, mode: str, ours: Connection) -> None:
    epoch = ours.recv()
    receiver = Receiver(tensors(fill=0.0))
    taking = CollectiveReceiver(receiver, make_member(transport, "cuda"))
    taking.open(epoch, number)
    draft = Publisher(tensors()).draft(0)
    taking.ready(1, draft)
    if mode in DEATHS and number == 2:
        os._exit(9)
    ours.send("ready")
    ack = taking.accept(draft)
    receiver.activate("policy", 0)
    assert receiver.live_digest() == ack.digest
    ours.send(ack.digest)


def processes(transport: str, mode: str, environment: Callable[[int], dict[str, str]]) -> list[str]:
    """What each of the three has to say in the end: a digest, an error, or "died"."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(DEVICES)]
    started = []
    for number, (_, theirs) in enumerate(pipes):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment(number).items():
                patch.setenv(name, value)
            process = context.Process(target=rank_of, args=(number, transport, mode, theirs), daemon=True)
            process.start()
            started.append(process)
        theirs.close()
    try:
        return _directed([ours for ours, _ in pipes])
    finally:
        for process in started:
            process.kill()
            process.join()


def _directed(pipes: list[Connection]) -> list[str]:
    sender, *receivers = pipes
    assert sender.poll(SECONDS)
    epoch = sender.recv()
    for each in receivers:
        each.send(epoch)
    answers = [_answer(each) for each in receivers]
    sender.send("all ready")
    last = [_answer(each) if answer == "ready" else answer for each, answer in zip(receivers, answers, strict=True)]
    return [_answer(sender), *last]


def _answer(pipe: Connection) -> str:
    assert pipe.poll(SECONDS), "a process hangs"
    try:
        return str(pipe.recv())
    except EOFError:
        return "died"


def own_device(number: int) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": str(number)}


@several
def test_everybody_has_what_was_staged(transport: str) -> None:
    digests = processes(transport, "late sender", own_device)
    assert len(set(digests)) == 1 and len(digests[0]) == 64, digests


@several
def test_two_processes_on_one_device_are_refused_by_name(transport: str) -> None:
    answers = processes(transport, "one device", lambda number: own_device(min(number, 1)))
    assert all("TransferFailed: epoch 1 could not be opened as rank" in answer for answer in answers), answers


@several
def test_a_peer_that_dies_before_its_first_bucket_hangs_nobody(transport: str) -> None:
    sender, survivor, dead = processes(transport, "peer dies", own_device)
    assert dead == "died" and "TransferFailed: broadcast in epoch 1 failed" in sender
    # The survivor may have all its bytes by the time the sender gives up.
    assert "TransferFailed: broadcast in epoch 1 failed" in survivor or len(survivor) == 64


@on_pretended
def test_an_error_that_nccl_notices_beside_the_transfer_is_named(transport: str) -> None:
    """A dead peer by torch's NCCL; by libnccl's stand-in the fourth broadcast (two belong to the set-up)."""
    mode, setting = {
        "nccl": ("peer dies and is noticed", "PRETEND_NCCL_PEER"),
        "pynccl": ("remote error", "PRETEND_NCCL_FAIL"),
    }[transport]
    failing = {setting: "error" if transport == "nccl" else "4"}
    sender, *_ = processes(transport, mode, lambda number: own_device(number) | failing)
    assert "TransferFailed: broadcast in epoch 1 failed: NCCL" in sender and "remote process exited" in sender


def alone(transport: str, publisher: Publisher) -> CollectiveSender:
    """A sender that is the only member of its group."""
    sender = CollectiveSender(publisher, make_member(transport, "cuda"))
    sender.open(Epoch(0, "secret", *sender.address(), 1, 60.0))
    return sender


def test_a_version_leaves_from_where_it_was_staged(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = Publisher(tensors(1000))
    sender = alone(transport, publisher)
    sent: list[int] = []
    broadcast = sender._member._broadcast
    monkeypatch.setattr(
        sender._member, "_broadcast", lambda buffer, *more: (sent.append(buffer.data_ptr()), broadcast(buffer, *more))
    )
    publisher.stage(0)
    slot = publisher._slots[publisher._staged[0].slot]
    sender.send(publisher.draft(0))
    assert sent == [slot.data_ptr()]
    header, data = publisher.payload(0)
    assert header == publisher.draft(0).sealed(publisher.layout.digests(data))
    sender.send(header)
    assert sent[1] != slot.data_ptr(), "sealed before: from host memory"
    sender.close()


def test_a_slot_is_not_staged_into_while_its_last_buckets_are_under_way(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = Publisher(tensors(1000))
    sender = alone(transport, publisher)
    broadcast = sender._member._broadcast

    def staging_behind(buffer: torch.Tensor, seen: Callable[[int], None], behind: Callable[[], torch.Tensor]) -> None:
        def then_stage() -> torch.Tensor:
            digests = behind()
            with pytest.raises(TransferFailed, match=r"staging version 2 waited 0 s for \[1\] to be sealed"):
                publisher.stage(2, deadline=0.0)
            return digests

        broadcast(buffer, seen, then_stage)

    monkeypatch.setattr(sender._member, "_broadcast", staging_behind)
    publisher.stage(0)
    publisher.stage(1)
    sender.send(publisher.draft(0))
    publisher.stage(2, deadline=0.0)
    assert publisher.retained() == (0,)
    sender.close()


def test_a_slot_is_free_again_after_a_broadcast_that_failed(transport: str) -> None:
    publisher = Publisher(tensors(1000))
    sender = alone(transport, publisher)
    for version in range(4):
        publisher.stage(version, deadline=0.0)
        sender.abort()
        with pytest.raises(TransferFailed, match="before the members were ready"):
            sender.send(publisher.draft(version))
        assert version in publisher.retained(), "it goes another way"


def test_what_is_staged_is_checked_on_the_device_before_it_leaves(transport: str) -> None:
    source = tensors(1000)
    publisher = Publisher(source)
    sender = alone(transport, publisher)
    publisher.stage(0)
    slot = publisher._slots[publisher._staged[0].slot]
    publisher.layout.views(slot)["m3"].zero_()
    torch.cuda.synchronize()
    with pytest.raises(WeightsMismatch, match=r"version 0 .* are not the trainer's: m3 begins 0, was"):
        sender.send(publisher.draft(0))
    assert publisher.retained() == ()
    publisher.stage(1)
    sender.send(publisher.draft(1))
    sender.close()


def test_a_copy_to_the_host_that_went_wrong_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what others than the group's members get."""
    publisher = Publisher(tensors(1000))
    publisher.stage(0)
    monkeypatch.setattr(HostCopy, "wait", lambda copy, end: None)
    work = publisher.begin(0)
    work.data[:] = 0
    torch.cuda.synchronize()
    work.data[:] = 0
    for _ in range(2):
        with pytest.raises(WeightsMismatch, match="are not the trainer's"):
            work.finish()
    assert publisher.retained() == () and len(publisher._free) == 2


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
    assert receiver.live_digest() == digest == publisher.payload(5)[0].digest
    kept = [storage for _, storage in receiver._retained.values()]
    assert all(storage.is_pinned() if on_host else storage.is_cuda for storage in kept)


@on_pretended
def test_a_delivery_does_not_wait_for_what_others_have_queued(transport: str) -> None:
    """Behind a denoising loop or an update, a copy on the default stream would begin when that has ended."""
    from pretended import report

    publisher = Publisher(tensors(1000))
    sender = alone(transport, publisher)
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
    sender.close()


@pytest.mark.real_gpu
def test_a_delivery_ends_while_the_default_stream_is_busy(transport: str) -> None:
    publisher = Publisher(tensors(1000))
    sender = alone(transport, publisher)
    receiver = Receiver(tensors(1000, fill=0.0))
    publisher.stage(0)
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000_000)  # cycles: some ten seconds
    queued = torch.cuda.Event()
    queued.record()
    sender.send(publisher.draft(0))
    receiver.receive(*publisher.payload(0))
    assert not queued.query(), "the delivery waited for the default stream"
    assert receiver.held() == (("policy", 0, "ring"),)
    sender.close()
