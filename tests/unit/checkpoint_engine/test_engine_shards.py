"""Tests of versions in shares: each row comes from the rank that has it; all are verified before any is retained."""

from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

import numpy as np
import pytest
import torch

from checkpoint_engine import Layout, Publisher, Receiver, ShardedHeader, ShardReceiver, TransferCorrupted, VersionGone
from checkpoint_engine.shards import shard_layout, shard_rows
from tests.support.share_ends import SHAPES, halted, received, share, weights

RANKS, BUCKET = 2, 100


def sealed(senders: list[Publisher], version: int) -> ShardedHeader:
    for rank, sender in enumerate(senders):
        sender.stage(version, share(weights(version), len(senders), rank))
    return ShardedHeader.of(Layout.of(weights(0)), [sender.seal(version) for sender in senders])


@pytest.fixture
def senders() -> list[Publisher]:
    return [Publisher(share(weights(0), RANKS, rank)) for rank in range(RANKS)]


@pytest.fixture
def live() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_shares_are_cut_as_torch_cuts_them(ranks: int) -> None:
    layout = Layout.of(weights(0))
    for rank in range(ranks):
        own = shard_layout(layout, ranks, rank)
        assert own.difference(Layout.of(share(weights(0), ranks, rank))) is None
        for entry in layout.entries:
            chunks = torch.chunk(torch.arange(entry.shape[0]), ranks)
            expected = chunks[rank].tolist() if rank < len(chunks) else []
            assert list(shard_rows(entry.shape[0], ranks, rank)) == expected


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("bucket", [1, 100, 256, 1 << 20])
def test_what_arrives_is_the_whole_model(ranks: int, bucket: int, live: dict[str, torch.Tensor]) -> None:
    senders = [Publisher(share(weights(0), ranks, rank)) for rank in range(ranks)]
    receiver = Receiver(live)
    shards, digests = ShardReceiver(receiver), []
    for version in (0, 1):
        header = sealed(senders, version)
        assert received(shards, header, senders, bucket).digest == header.digest
        digests.append(receiver.activate("policy", version))
        assert all(torch.equal(live[name], tensor) for name, tensor in weights(version).items())
        assert receiver.live_digest() == digests[-1] == header.digest
    assert digests[0] != digests[1]
    live["proj"].data[0, 499] += 1.0
    assert receiver.live_digest() != digests[1]


def test_a_version_that_is_not_finished_is_never_served(
    senders: list[Publisher], live: dict[str, torch.Tensor]
) -> None:
    receiver = Receiver(live)
    shards = ShardReceiver(receiver)
    received(shards, sealed(senders, 0), senders, BUCKET)
    torn, whole = sealed(senders, 1), sealed(senders, 2)
    shards.begin(torn, RANKS)
    shards.take(1, 0, 0, senders[0].piece(1, 0, BUCKET)[1])
    assert receiver.held() == (("policy", 0, "ring"),)
    with pytest.raises(TransferCorrupted, match="ended at byte 100 of"):
        shards.finish(torn)
    received(shards, whole, senders, BUCKET)
    assert receiver.held() == (("policy", 0, "ring"), ("policy", 2, "ring"))
    receiver.activate("policy", 0)
    assert all(torch.equal(live[name], tensor) for name, tensor in weights(0).items())
    with pytest.raises(TransferCorrupted, match="a piece of version 1 arrived, which was not begun here"):
        shards.take(1, 0, BUCKET, senders[0].piece(1, BUCKET, BUCKET)[1])


class Halted(RuntimeError):
    """What happens in the middle of a bucket."""


def halt() -> NoReturn:
    raise Halted


@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("half", [1, 250, 600])
def test_a_bucket_that_is_taken_in_part_is_neither_retained_nor_served(
    senders: list[Publisher], live: dict[str, torch.Tensor], shard: int, half: int
) -> None:
    """In memory lie whole shares, then a part of a bucket; the receiver may be asked for anything then."""
    receiver = Receiver(live, capacity=2)
    shards = ShardReceiver(receiver)
    received(shards, sealed(senders, 0), senders, BUCKET)
    receiver.activate("policy", 0)
    torn, whole = sealed(senders, 1), sealed(senders, 2)
    shards.begin(torn, RANKS)
    for index in range(shard):
        shards.take(1, index, 0, senders[index].payload(1)[1])
    with pytest.raises(Halted), halted(half, halt):
        shards.take(1, shard, 0, senders[shard].payload(1)[1])
    with pytest.raises(TransferCorrupted, match=f"ended at byte {half} of .* of shard {shard}"):
        shards.finish(torn)
    assert receiver.held() == (("policy", 0, "ring"),)
    assert receiver.live_digest() == receiver.activate("policy", 0)
    assert all(torch.equal(live[name], tensor) for name, tensor in weights(0).items())
    received(shards, whole, senders, BUCKET)
    assert receiver.held() == (("policy", 0, "ring"), ("policy", 2, "ring"))
    assert receiver.activate("policy", 2) == receiver.live_digest() == whole.digest
    assert all(torch.equal(live[name], tensor) for name, tensor in weights(2).items())


@pytest.mark.parametrize("shard", [0, 1])
def test_one_wrong_bit_names_tensor_and_share(
    senders: list[Publisher], live: dict[str, torch.Tensor], shard: int
) -> None:
    receiver = Receiver(live)
    shards, header = ShardReceiver(receiver), sealed(senders, 0)
    shards.begin(header, RANKS)
    for index, sender in enumerate(senders):
        data = sender.payload(0)[1].copy()
        if index == shard:
            data[sender.layout.entries[2].offset] ^= 1
        shards.take(0, index, 0, data)
    with pytest.raises(TransferCorrupted, match=f"wrong bytes in blocks.1.weight, in shard {shard} of it"):
        shards.finish(header)
    assert receiver.held() == ()
    received(shards, header, senders, BUCKET)
    assert receiver.held() == (("policy", 0, "ring"),)


@pytest.mark.parametrize(
    "piece",
    [
        lambda shards, data: shards.take(0, 0, 10, data[10:20]),
        lambda shards, data: shards.take(0, 5, 0, data[:10]),
        lambda shards, data: [shards.take(0, 0, 0, data[:10]), shards.take(0, 0, 0, data[:10])],
        lambda shards, data: shards.take(0, 0, 0, np.concatenate([data, data])),
    ],
    ids=["a gap", "no such share", "twice", "too long"],
)
def test_pieces_that_do_not_follow_are_refused(
    senders: list[Publisher], live: dict[str, torch.Tensor], piece: Callable[..., object]
) -> None:
    shards, header = ShardReceiver(Receiver(live)), sealed(senders, 0)
    shards.begin(header, RANKS)
    with pytest.raises(TransferCorrupted, match="do not follow what came before"):
        piece(shards, senders[0].payload(0)[1])


def test_shares_that_are_not_of_one_version_make_no_header(senders: list[Publisher]) -> None:
    header = sealed(senders, 0)
    for rank, sender in enumerate(senders):
        sender.stage(1, share(weights(1), RANKS, rank))
    layout = Layout.of(weights(0))
    with pytest.raises(ValueError, match="policy 1 is no share of policy 0"):
        ShardedHeader.of(layout, [senders[0].seal(0), senders[1].seal(1)])
    with pytest.raises(ValueError, match="shard 0 of 2 of policy 0"):
        ShardedHeader.of(layout, [senders[1].seal(0), senders[0].seal(0)])
    assert not replace(header, shares=header.shares[::-1]).is_consistent()
    shards = ShardReceiver(Receiver(weights(0)))
    shards.begin(header, RANKS)
    with pytest.raises(TransferCorrupted, match="damaged header"):
        shards.finish(replace(header, shares=header.shares[::-1]))


def test_bytes_that_are_sent_before_the_digests_are_those_that_are_sealed(live: dict[str, torch.Tensor]) -> None:
    senders = [Publisher(share(weights(0), RANKS, rank), retain=1) for rank in range(RANKS)]
    receiver, layout = Receiver(live), Layout.of(weights(0))
    shards = ShardReceiver(receiver)
    for version in range(4):
        for rank, sender in enumerate(senders):
            sender.stage(version, share(weights(version), RANKS, rank))
        shards.begin(replace(senders[0].draft(version), layout=layout), RANKS)
        headers: list[Header | None] = []
        for rank, sender in enumerate(senders):
            for start in range(0, sender.layout.nbytes, BUCKET):
                assert version not in sender.retained()
                header_of_share, data = sender.piece(version, start, BUCKET)
                shards.take(version, rank, start, data)
                headers.append(header_of_share)
            assert version in sender.retained() and sender.seal(version) == headers[-1]
        of_shares = [each for each in headers if each is not None]
        assert len(of_shares) == RANKS, "the last piece of each share has its header"
        header = ShardedHeader.of(layout, of_shares)
        assert shards.finish(header).digest == header.digest == receiver.activate("policy", version)
        assert all(torch.equal(live[name], tensor) for name, tensor in weights(version).items())
        assert receiver.live_digest() == header.digest
    senders[0].stage(7)
    senders[0].piece(7, 0, BUCKET)
    senders[0].clear()
    with pytest.raises(VersionGone):
        senders[0].piece(7, 0, BUCKET)
    senders[0].stage(7)
    assert senders[0].seal(7).version == 7, "its place was freed"
