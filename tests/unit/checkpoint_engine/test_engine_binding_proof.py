"""Tests of the binding proof: it shows in which module a tensor arrived, and with which scale, as no digest can."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from checkpoint_engine import PROOF_VERSION, Publisher, Receiver, WeightsMismatch, binding_probe, proof_tensors
from checkpoint_engine import check_binding as check
from tests.support.live import live_digest
from tests.unit.checkpoint_engine.engine_parts import ALPHA, RANK, blank, lora, modules_of

Change = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
SQUARE = RANK
"""Width at which A and B have the same shape, so that only the proof can tell them apart."""


def proof(change: Change = dict, *, width: int = 16) -> Receiver:
    """A receiver with the proof weights live, its tensors changed between the trainer's modules and the buffer.

    Every digest on the way is right whatever the change was.
    """
    tensors = lora(width=width)
    publisher = Publisher(tensors, alpha=ALPHA, rank=RANK)
    publisher.stage(PROOF_VERSION, change(proof_tensors(publisher.layout, seed=3)))
    publisher.seal(PROOF_VERSION)
    receiver = Receiver(blank(tensors), alpha=ALPHA, rank=RANK)
    receiver.receive(*publisher.payload(PROOF_VERSION))
    assert receiver.activate("policy", PROOF_VERSION) == live_digest(receiver)
    return receiver


def prove(receiver: Receiver, *, scaling: float = ALPHA / RANK) -> None:
    """Compares what the trainer's proof weights compute with what the receiver's live modules do."""
    trainer = binding_probe(modules_of(proof_tensors(receiver.layout, seed=3)))
    check(trainer, binding_probe(modules_of(receiver.tensors, scaling=scaling)), who="w-0")


def swap(first: str, second: str) -> Change:
    return lambda tensors: {**tensors, first: tensors[second], second: tensors[first]}


def test_a_faithful_delivery_passes() -> None:
    prove(proof())
    prove(proof(width=SQUARE))


@pytest.mark.parametrize(
    ("one", "other", "width", "module"),
    [
        ("block.1.lora_A.weight", "block.1.lora_B.weight", SQUARE, "block.1"),
        ("block.0.lora_A.weight", "block.2.lora_A.weight", SQUARE, "block.0"),
        ("block.1.lora_B.weight", "block.2.lora_B.weight", SQUARE, "block.1"),
        ("block.0.lora_B.weight", "block.2.lora_B.weight", 16, "block.0"),
    ],
)
def test_swaps_before_hashing_pass_every_digest_and_only_the_proof_finds_them(
    one: str, other: str, width: int, module: str
) -> None:
    """Without the proof nothing fails: `proof` itself checks every digest on the way."""
    receiver = proof(swap(one, other), width=width)
    with pytest.raises(WeightsMismatch, match=f"{module} at w-0 doesn't compute"):
        prove(receiver)


def test_a_wrong_scaling_is_found_though_every_digest_is_right() -> None:
    with pytest.raises(WeightsMismatch, match="another alpha"):
        prove(proof(), scaling=1.0)


def test_b_zero_proves_nothing_and_is_refused() -> None:
    tensors = lora()
    zero = {name: torch.zeros_like(t) if "lora_B" in name else t for name, t in tensors.items()}
    probe = binding_probe(modules_of(zero))
    with pytest.raises(WeightsMismatch, match=r"block.0 has output norm 0"):
        check(probe, probe)
