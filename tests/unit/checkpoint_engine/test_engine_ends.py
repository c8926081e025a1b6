"""Tests of Publisher and Receiver, the two ends of a delivery, in one process."""

import pickle
import threading
import time

import pytest
import torch

from checkpoint_engine import (
    EVALUATION,
    Ack,
    Activation,
    Layout,
    Publisher,
    Receiver,
    TransferFailed,
    VersionGone,
    WeightsMismatch,
)
from checkpoint_engine.publisher import HostBuffers
from tests.support.live import live_digest
from tests.unit.checkpoint_engine.engine_parts import ALPHA, RANK, blank, ends, flipped, lora, resealed, sealed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_delivered_weights_are_the_published_ones_bit_for_bit(dtype: torch.dtype) -> None:
    tensors = lora(dtype=dtype)
    publisher, receiver = ends(tensors)
    header, data = sealed(publisher, 0)
    header = pickle.loads(pickle.dumps(header))
    assert receiver.receive(header, data) == Ack("policy", 0, header.digest)
    assert receiver.active is None
    assert receiver.activate("policy", 0) == header.digest == live_digest(receiver)
    assert receiver.active == Activation("policy", 0, header.digest)
    live = receiver.tensors
    assert all(torch.equal(live[name], tensor) for name, tensor in tensors.items())


def test_addresses_never_change_and_activation_of_older_versions_works() -> None:
    tensors = lora()
    publisher, receiver = ends(tensors)
    before = {n: t.data_ptr() for n, t in receiver.tensors.items()}
    digests = []
    for version in range(2):
        digests.append(receiver.receive(*sealed(publisher, version)).digest)
        for tensor in tensors.values():
            tensor.add_(1.0)
    assert receiver.activate("policy", 1) == digests[1]
    assert receiver.activate("policy", 0) == digests[0] == live_digest(receiver)
    assert {n: t.data_ptr() for n, t in receiver.tensors.items()} == before
    assert all(ptr % 64 == 0 for ptr in before.values())


@pytest.mark.parametrize("on_host", [False, True])
def test_live_bytes_that_something_wrote_last_until_the_next_activation_or_with_a_ring_on_the_host_version(
    on_host: bool,
) -> None:
    tensors = lora()
    publisher = Publisher(tensors, alpha=ALPHA, rank=RANK)
    receiver = Receiver(blank(tensors), alpha=ALPHA, rank=RANK, on_host=on_host)
    for version in range(2):
        receiver.receive(*sealed(publisher, version))
    digest = receiver.activate("policy", 1)
    next(iter(receiver.tensors.values())).data.add_(1.0)
    assert live_digest(receiver) != digest
    assert receiver.activate("policy", 1) == digest
    assert (live_digest(receiver) == digest) == (not on_host)
    assert receiver.activate("policy", 0) == live_digest(receiver)


def test_ring_keeps_the_newest_and_the_evaluation_slot_its_own() -> None:
    publisher, receiver = ends(lora(), capacity=2)
    for version in range(5):
        receiver.receive(*sealed(publisher, version))
        if version == 1:
            receiver.receive(*publisher.payload(1), EVALUATION)
    assert receiver.held() == (("policy", 1, EVALUATION), ("policy", 3, "ring"), ("policy", 4, "ring"))
    receiver.activate("policy", 1, slot=EVALUATION)
    assert receiver.active is not None and receiver.active.version == 1
    receiver.receive(*publisher.payload(3), EVALUATION)
    assert receiver.held() == (("policy", 3, EVALUATION), ("policy", 3, "ring"), ("policy", 4, "ring"))
    with pytest.raises(WeightsMismatch, match=r"policy 1 \(evaluation\) is not held"):
        receiver.activate("policy", 1, slot=EVALUATION)


def test_streams_have_their_own_rings() -> None:
    tensors = lora()
    receiver = Receiver(blank(tensors), ("policy", "ema"), alpha=ALPHA, rank=RANK, capacity=1)
    for stream in ("policy", "ema"):
        receiver.receive(*sealed(Publisher(tensors, stream, alpha=ALPHA, rank=RANK), 3))
    assert [held[:2] for held in receiver.held()] == [("ema", 3), ("policy", 3)]
    with pytest.raises(WeightsMismatch, match="stream 'sampling' is not expected"):
        receiver.receive(*sealed(Publisher(tensors, "sampling", alpha=ALPHA, rank=RANK), 0))


def test_stale_and_twice_named_versions_stop() -> None:
    tensors = lora()
    publisher, receiver = ends(tensors)
    old = sealed(publisher, 0)
    for version in (1, 2, 3):
        receiver.receive(*sealed(publisher, version))
    with pytest.raises(WeightsMismatch, match="version 0 of stream policy is stale"):
        receiver.receive(*old)
    header, data = publisher.payload(3)
    assert receiver.receive(header, data).digest == header.digest
    other = flipped(data, 9)
    with pytest.raises(WeightsMismatch, match="twice with different contents"):
        receiver.receive(resealed(header, other), other)


def test_staging_waits_for_the_version_before_the_last_one() -> None:
    publisher, _ = ends(lora())
    publisher.stage(0)
    publisher.stage(1)
    with pytest.raises(TransferFailed, match=r"staging version 2 waited 0.01 s for \[0, 1\] to be sealed"):
        publisher.stage(2, deadline=0.01)
    threading.Timer(0.05, lambda: publisher.seal(0)).start()
    publisher.stage(2, deadline=120.0)
    with pytest.raises(ValueError, match="published already"):
        publisher.stage(1)
    publisher.seal(1)
    publisher.seal(2)


def test_publisher_retains_the_newest_and_the_held() -> None:
    publisher, _ = ends(lora(), capacity=2)
    _, first = sealed(publisher, 0)
    copy = first.copy()
    publisher.hold(0)
    for version in (1, 2, 3):
        sealed(publisher, version)
    assert publisher.retained() == (0, 2, 3)
    publisher.release(0)
    assert publisher.retained() == (2, 3)
    assert (first == copy).all()
    for action in (publisher.payload, publisher.hold, publisher.seal):
        with pytest.raises(VersionGone):
            action(0)
    publisher.stage(9)
    publisher.clear()
    assert publisher.retained() == ()
    for version in (0, 1):
        publisher.stage(version, deadline=0.0)


def test_a_buffer_comes_back_when_its_last_reader_lets_go() -> None:
    buffers = HostBuffers(Layout.of(lora()))
    first = buffers.take()
    place, kept = first.data.ctypes.data, torch.from_numpy(first.data[8:16])
    del first
    second = buffers.take()
    assert second.data.ctypes.data != place, "a tensor made of a slice of it still reads it"
    del kept
    assert buffers.take().data.ctypes.data == place


def test_other_tensors_of_the_layout_can_be_published() -> None:
    publisher, receiver = ends(lora())
    proof = {name: torch.full_like(tensor, 7.0).double() for name, tensor in lora().items()}
    publisher.stage(-1, proof)
    publisher.seal(-1)
    receiver.receive(*publisher.payload(-1))
    receiver.activate("policy", -1)
    assert all((t == 7.0).all() for t in receiver.tensors.values())
    with pytest.raises(WeightsMismatch, match=r"lora_A.weight is not as in its layout"):
        publisher.stage(5, {n: t for n, t in proof.items() if "0.lora_A" not in n})
    with pytest.raises(WeightsMismatch, match="extra is not as in its layout"):
        publisher.stage(5, proof | {"extra": torch.zeros(1)})


def test_no_torn_versions_under_load() -> None:
    """A worker reads the live tensors at the start and end of its work while 100 publishes arrive beside it."""
    tensors = lora(width=256)
    publisher, receiver = ends(tensors, capacity=2)
    published: dict[int, str] = {}
    stop = threading.Event()

    def publish() -> None:
        for version in range(100):
            header, data = sealed(publisher, version)
            published[version] = header.digest
            receiver.receive(header, data)
            for tensor in tensors.values():
                tensor.mul_(-1.01)
        stop.set()

    thread = threading.Thread(target=publish)
    thread.start()
    pieces = 0
    while not stop.is_set() or pieces == 0:
        held = receiver.held()
        if not held:
            time.sleep(0)
            continue
        try:
            digest = receiver.activate("policy", held[0][1])
        except WeightsMismatch:
            continue
        values = {name: tensor.clone() for name, tensor in receiver.tensors.items()}
        assert live_digest(receiver) == digest == published[held[0][1]]
        again = Layout.of(values).views(receiver.live)
        assert all(torch.equal(values[name], again[name]) for name in values)
        pieces += 1
    thread.join()
    assert len(published) == 100 and receiver.held()[-1][1] == 99
