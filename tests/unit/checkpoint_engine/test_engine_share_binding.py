"""Whole weights in shares: the probe of the canary names two tensors of one shape that took each other's rows."""

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from checkpoint_engine import (
    Layout,
    Publisher,
    Receiver,
    ShardedHeader,
    ShardReceiver,
    TransferCorrupted,
    WeightsMismatch,
    canary_tensors,
    check_binding,
    shards,
    tensor_probe,
)
from tests.support.share_ends import SHAPES, received, share, weights

RANKS, BUCKET = 2, 100
ONE, OTHER = "blocks.0.weight", "blocks.1.weight"


def delivered(version: int, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Delivers a version in shares and activates it; returns the live tensors. Its digests are compared on the way."""
    senders = [Publisher(share(tensors, RANKS, rank)) for rank in range(RANKS)]
    for sender in senders:
        sender.stage(version)
    header = ShardedHeader.of(Layout.of(tensors), [sender.seal(version) for sender in senders])
    live = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    receiver = Receiver(live, on_host=True)
    received(ShardReceiver(receiver), header, senders, BUCKET)
    assert receiver.activate("policy", version) == receiver.live_digest() == header.digest
    return live


def rows_swapped(places: Callable[..., Sequence[int]]) -> Callable[..., Sequence[int]]:
    """Planted fault: a receiver puts the rows of two tensors of one shape in each other's place."""

    def fault(layout: Layout, *arguments: Any) -> Sequence[int]:
        found = dict(zip((entry.name for entry in layout.entries), places(layout, *arguments), strict=True))
        found[ONE], found[OTHER] = found[OTHER], found[ONE]
        return tuple(found.values())

    return fault


def test_every_tensor_gets_its_own_rows() -> None:
    canary = canary_tensors(Layout.of(weights(0)), 7)
    check_binding(tensor_probe(canary), tensor_probe(delivered(-1, canary)))


def test_rows_that_are_swapped_pass_every_digest_and_are_named_by_the_probe() -> None:
    canary = canary_tensors(Layout.of(weights(0)), 7)
    with mock.patch.object(shards, "_places", rows_swapped(shards._places)):
        live = delivered(-1, canary)
    with pytest.raises(WeightsMismatch, match=ONE):
        check_binding(tensor_probe(canary), tensor_probe(live))


def test_a_version_that_is_damaged_or_torn_is_not_retained() -> None:
    senders = [Publisher(share(weights(0), RANKS, rank)) for rank in range(RANKS)]
    for sender in senders:
        sender.stage(0)
    header = ShardedHeader.of(Layout.of(weights(0)), [sender.seal(0) for sender in senders])
    receiver = Receiver({name: torch.zeros(shape) for name, shape in SHAPES.items()})
    for damage in (lambda data: data[:-256], lambda data: data ^ 1):
        taking = ShardReceiver(receiver)
        taking.begin(header, RANKS)
        for rank, sender in enumerate(senders):
            taking.take(0, rank, 0, damage(sender.payload(0)[1]) if rank else sender.payload(0)[1])
        with pytest.raises(TransferCorrupted):
            taking.finish(header)
        assert receiver.held() == ()
