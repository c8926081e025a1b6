"""Tests of gathers: versions whose rows lie on several ranks come whole to the first one, over real gloo."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from checkpoint_engine import (
    Draft,
    Layout,
    Receiver,
    TransferFailed,
    VersionGone,
    WeightsMismatch,
    check_binding,
    proof_tensors,
    tensor_probe,
)
from checkpoint_engine.gather import Gather, shard_rows
from tests.support.gathered import SHAPES, Ranks, weights
from tests.support.live import live_digest

ONE, OTHER = "blocks.0.weight", "blocks.1.weight"


def live_after(ranks: Ranks, version: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gathers a version, and delivers it as the first rank has it; returns a receiver's live tensors."""
    header = ranks.gather(version, tensors)
    live = {name: torch.zeros(shape, dtype=tensors[name].dtype) for name, shape in SHAPES.items()}
    receiver = Receiver(live, on_host=True)
    receiver.receive(*ranks.ranks[0].versions.payload(version))
    assert receiver.activate("policy", version) == live_digest(receiver) == header.digest
    return live


@pytest.mark.parametrize(
    ("ranks", "bucket", "dtype", "alignment"),
    [
        (2, 1, torch.float32, 256),
        (2, 700, torch.bfloat16, 128),
        (3, 700, torch.float32, 256),
        (3, 1 << 20, torch.bfloat16, 128),
        (8, 1 << 20, torch.float32, 256),
        (8, 1, torch.bfloat16, 128),
    ],
)
def test_a_gathered_version_is_that_of_one_sender(ranks: int, bucket: int, dtype: torch.dtype, alignment: int) -> None:
    """With any number of ranks and any buckets, of bytes and digests; some ranks have no row of a tensor."""
    made = Ranks(ranks, weights(0, dtype), bucket_bytes=bucket, alignment=alignment)
    for version in range(3):
        tensors = weights(version, dtype)
        header, layout = made.gather(version, tensors), Layout.of(tensors)
        assert header == Draft("policy", version, layout, None, None).sealed(layout.digests(layout.packed(tensors)))
        found = layout.views(torch.from_numpy(made.ranks[0].versions.payload(version)[1]))
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert [rank.versions.retained() for rank in made.ranks] == [(2,), *[()] * (ranks - 1)]


def test_the_rows_of_a_rank_are_those_of_fsdp() -> None:
    for rows in range(12):
        chunks = [len(chunk) for chunk in torch.chunk(torch.empty(rows, 2), 5)] if rows else []
        assert [len(shard_rows(rows, 5, index)) for index in range(5)] == chunks + [0] * (5 - len(chunks))


def test_an_older_version_is_gathered_once_more_and_is_not_retained() -> None:
    made = Ranks(2, weights(0))
    first = made.gather(0, weights(0))
    made.gather(1, weights(1))
    with pytest.raises(VersionGone):
        made.ranks[0].versions.payload(0)
    again = made.each(lambda rank: rank.versions.recall(0, rank.gather.share(rank.flat(weights(0)))))
    assert again[0][0] == first and again[1] == (None, None)
    assert made.ranks[0].versions.retained() == (1,)
    receiver = Receiver({name: torch.zeros(shape) for name, shape in SHAPES.items()})
    assert receiver.receive(first, again[0][1]).version == 0


def rows_swapped(place: Callable[..., None]) -> Callable[..., None]:
    """Planted fault: the first rank takes the rows of two tensors of one shape for each other's."""

    def fault(self: Gather, bucket: range, number: int, pieces: Sequence[Any], work: Any) -> None:
        names = [entry.name for entry in self.layout.entries]
        for share, (begin, _), piece in zip(self._shares, self._spans[number], pieces, strict=True):
            one, other = (share.entries[names.index(name)] for name in (ONE, OTHER))
            if names.index(ONE) in bucket:
                assert names.index(OTHER) in bucket
                ours, theirs = (slice(entry.offset - begin, entry.end - begin) for entry in (one, other))
                piece[ours], piece[theirs] = piece[theirs].copy(), piece[ours].copy()
        place(self, bucket, number, pieces, work)

    return fault


def test_every_tensor_gets_its_own_rows() -> None:
    proof = proof_tensors(Layout.of(weights(0)), 7)
    live = live_after(Ranks(2, proof, bucket_bytes=1 << 20), -1, proof)
    check_binding(tensor_probe(proof), tensor_probe(live))


def test_rows_that_are_swapped_before_their_sample_pass_every_digest_and_are_named_by_the_probe() -> None:
    proof = proof_tensors(Layout.of(weights(0)), 7)
    swapped = proof | {ONE: proof[OTHER], OTHER: proof[ONE]}
    live = live_after(Ranks(2, proof), -1, swapped)
    with pytest.raises(WeightsMismatch, match=ONE):
        check_binding(tensor_probe(proof), tensor_probe(live))


def test_rows_that_come_into_the_wrong_place_are_named_by_the_sample() -> None:
    made = Ranks(2, weights(0), bucket_bytes=1 << 20)
    with mock.patch.object(Gather, "place", rows_swapped(Gather.place)):
        shares = made.each(lambda rank: rank.gather.share(rank.flat(weights(0))))
        sent = made.threads.submit(made.ranks[1].versions.gather, 0, shares[1])
        with pytest.raises(WeightsMismatch, match=f"of rank 0 .*{ONE}"):
            made.ranks[0].versions.gather(0, shares[0])
    assert made.ranks[0].versions.retained() == ()
    del sent


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_that_change_after_the_version_was_made_are_named(rank: int) -> None:
    made = Ranks(2, weights(0))
    shares = made.each(lambda each: each.gather.share(each.flat(weights(0))))
    shares[rank].flat.view(torch.float32)[0] += 1.0
    sent = made.threads.submit(made.ranks[1].versions.gather, 0, shares[1])
    with pytest.raises(WeightsMismatch, match=f"version 0 of stream policy, of rank {rank} .*blocks.0.norm"):
        made.ranks[0].versions.gather(0, shares[0])
    assert made.ranks[0].versions.retained() == ()
    del sent


def test_ranks_that_are_not_at_the_same_gather_end_it_and_mix_no_rows() -> None:
    """The second rank sends its rows of version 0, which the first one has given up."""
    made = Ranks(2, weights(0), seconds=1.0)
    first, other = made.ranks
    made.threads.submit(other.versions.gather, 0, other.gather.share(other.flat(weights(0))))
    first.gather.count += 1
    with pytest.raises(TransferFailed):
        first.versions.gather(1, first.gather.share(first.flat(weights(1))))
    assert first.versions.retained() == ()
