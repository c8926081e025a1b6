"""Tests of digests computed beside the transfer at both ends, and of bytes that are received in their final place."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from checkpoint_engine import Publisher, TransferCorrupted, WeightsMismatch
from checkpoint_engine import process_group as links_module
from checkpoint_engine.base import Header
from checkpoint_engine.collective import CollectiveReceiver
from checkpoint_engine.incremental import trailer, trailer_bytes
from checkpoint_engine.process_group import Limit, Link
from tests.unit.checkpoint_engine.engine_local import Local, linked
from tests.unit.checkpoint_engine.engine_parts import ALPHA, RANK, ends, flipped, freeze, lora, sealed

VICTIM = "block.1.lora_A.weight"


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "BUCKET_BYTES", 4096)


class Handed:
    """A link whose other end is an array: what it gives for the payload and for the trailer."""

    def __init__(self, payload: bytes, last: bytes) -> None:
        self.payload, self.last = payload, last

    def open(self, store: object, epoch: object, rank: int) -> None: ...

    def broadcast(
        self, buffer: torch.Tensor, limit: Limit, seen: Callable[[int], None], behind: Callable[[], torch.Tensor]
    ) -> None:
        part = np.frombuffer(self.payload, np.uint8)
        for start in range(0, buffer.shape[0], 1000):
            buffer[start : start + 1000] = torch.from_numpy(part[start : start + 1000].copy())
            seen(min(start + 1000, buffer.shape[0]))
        behind()[:] = torch.frombuffer(bytearray(self.last), dtype=torch.uint8)

    def abort(self) -> None: ...


def taking(receiver: object, link: Link) -> CollectiveReceiver:
    end = CollectiveReceiver(receiver)  # type: ignore[arg-type]
    end.link, end.epoch = link, links_module.Epoch("gloo", 1, "secret", "h", 1, 2, 5.0)
    return end


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda h, d: (flipped(d, h.layout.entries[2].offset + 9), trailer(h)), f"wrong bytes in {VICTIM}"),
        (lambda h, d: (d, bytes([trailer(h)[0] ^ 1]) + trailer(h)[1:]), "damaged trailer"),
        (lambda h, d: (d, trailer(h)[:-1] + bytes([trailer(h)[-1] ^ 1])), "damaged trailer"),
        (lambda h, d: (d, trailer(replace(h, version=7).sealed(h.digests))), "damaged trailer"),
    ],
)
def test_damage_in_a_broadcast_asks_for_a_resend_and_leaves_what_is_held(spoil, message: str) -> None:
    publisher, receiver = ends(lora())
    receiver.receive(*sealed(publisher, 0))
    header, data = sealed(publisher, 1)
    payload, behind = spoil(header, data)
    with pytest.raises(TransferCorrupted, match=message):
        taking(receiver, Handed(payload.tobytes(), behind)).accept(publisher.draft(1))
    assert receiver.held() == (("policy", 0, "ring"),)


def test_the_trailer_is_the_digests_and_the_digest_of_the_whole() -> None:
    publisher, _ = ends(lora())
    header, _ = sealed(publisher, 0)
    assert len(trailer(header)) == trailer_bytes(header.layout) == 16 * len(header.digests) + 32
    assert isinstance(header, Header) and publisher.draft(0).sealed(header.digests) == header


def test_others_that_want_a_version_wait_while_it_is_sealed_beside_its_transfer() -> None:
    publisher, _ = ends(lora())
    publisher.stage(0)
    work = publisher.begin(0)
    work.feed(100)
    found: list[Header] = []
    thread = threading.Thread(target=lambda: found.append(publisher.seal(0)))
    thread.start()
    publisher.stage(1)
    publisher.stage(2, deadline=0.0)
    assert found == [] and publisher.retained() == ()
    header = work.finish()
    thread.join()
    assert found == [header] and work.finish() is header and publisher.begin(0).header is header
    again = Publisher(lora(), alpha=ALPHA, rank=RANK)
    assert sealed(again, 0)[0] == header


def test_a_stale_copy_stops_the_run_before_it_leaves_and_names_the_tensor() -> None:
    async def main() -> None:
        tensors = lora(width=512)
        end = Local(tensors, "a")
        async with linked(tensors, [end]) as made:
            await made.publish(0)
            freeze(made.publisher, 0)
            tensors[VICTIM].mul_(1.01)
            with pytest.raises(WeightsMismatch, match=f"version 1 .* {VICTIM} begins"):
                await made.publish(1)
            assert end.receiver.held() == (("policy", 0, "ring"),)

    asyncio.run(main())
