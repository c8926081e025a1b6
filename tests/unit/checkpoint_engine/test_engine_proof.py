import pytest
import torch
from engine_parts import ALPHA, RANK, blank, ends, lora, modules_of, sealed

from checkpoint_engine import CANARY_VERSION, Publisher, Receiver, WeightsMismatch, binding_probe, canary_tensors
from checkpoint_engine import check_binding as check

SQUARE = RANK
"""Width at which A and B have the same shape, so that only the proof can tell them apart."""


def canary_run(change=lambda tensors: tensors, *, scaling: float = ALPHA / RANK, width: int = 16) -> None:
    """Delivers a canary whose tensors were changed between the trainer's modules and the buffer, then compares."""
    tensors = lora(width=width)
    publisher = Publisher(tensors, alpha=ALPHA, rank=RANK)
    canary = canary_tensors(publisher.layout, seed=3)
    receiver = Receiver(blank(tensors), alpha=ALPHA, rank=RANK)
    publisher.stage(CANARY_VERSION, change(canary))
    publisher.seal(CANARY_VERSION)
    receiver.receive(*publisher.payload(CANARY_VERSION))
    receiver.activate("policy", CANARY_VERSION)
    check(binding_probe(modules_of(canary)), binding_probe(modules_of(receiver._tensors, scaling=scaling)), who="w-0")


def swap(first: str, second: str):
    return lambda tensors: tensors | {first: tensors[second], second: tensors[first]}


def test_a_faithful_delivery_passes() -> None:
    canary_run()
    canary_run(width=SQUARE)


def test_equal_shaped_modules_swapped_before_hashing_are_found() -> None:
    with pytest.raises(WeightsMismatch, match=r"block.0 at w-0 doesn't compute"):
        canary_run(swap("block.0.lora_B.weight", "block.2.lora_B.weight"))


def test_a_and_b_swapped_are_found_even_when_square() -> None:
    with pytest.raises(WeightsMismatch, match=r"block.1 at w-0 doesn't compute"):
        canary_run(swap("block.1.lora_A.weight", "block.1.lora_B.weight"), width=SQUARE)


def test_a_wrong_scaling_is_found_though_every_digest_is_right() -> None:
    with pytest.raises(WeightsMismatch, match="another alpha"):
        canary_run(scaling=1.0)


def test_b_zero_proves_nothing_and_is_refused() -> None:
    tensors = lora()
    zero = {name: torch.zeros_like(t) if "lora_B" in name else t for name, t in tensors.items()}
    probe = binding_probe(modules_of(zero))
    with pytest.raises(WeightsMismatch, match=r"block.0 has output norm 0"):
        check(probe, probe)


def test_missing_modules_are_named() -> None:
    probe = binding_probe(modules_of(lora()))
    with pytest.raises(WeightsMismatch, match=r"block.1 is not adapted at the receiver"):
        check(probe, {n: p for n, p in probe.items() if n != "block.1"})
    with pytest.raises(WeightsMismatch, match=r"block.1 is not adapted at the trainer"):
        check({n: p for n, p in probe.items() if n != "block.1"}, probe)


def test_nan_is_not_equal() -> None:
    probe = binding_probe(modules_of(lora()))
    broken = {name: values * float("nan") for name, values in probe.items()}
    for pair in ((probe, broken), (broken, probe), (broken, broken)):
        with pytest.raises(WeightsMismatch):
            check(*pair)


def test_version_zero_replaces_the_canary() -> None:
    publisher, receiver = ends(lora())
    publisher.stage(CANARY_VERSION, canary_tensors(publisher.layout, seed=0))
    publisher.seal(CANARY_VERSION)
    receiver.receive(*publisher.payload(CANARY_VERSION))
    canary = receiver.activate("policy", CANARY_VERSION)
    receiver.receive(*sealed(publisher, 0))
    assert receiver.activate("policy", 0) != canary
    assert all(torch.equal(receiver._tensors[n], t) for n, t in lora().items())
    assert canary_tensors(publisher.layout, seed=0)["block.0.lora_A.weight"].equal(
        canary_tensors(publisher.layout, seed=0)["block.0.lora_A.weight"]
    )


def test_probing_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(1)
    expected = torch.randn(3)
    torch.manual_seed(1)
    binding_probe(modules_of(lora()))
    canary_tensors(ends(lora())[0].layout, seed=4)
    assert torch.equal(torch.randn(3), expected)


def test_without_the_canary_a_swap_at_b_zero_is_invisible() -> None:
    tensors = {name: torch.zeros_like(t) if "lora_B" in name else t for name, t in lora().items()}
    swapped = swap("block.0.lora_B.weight", "block.2.lora_B.weight")(tensors)
    trainer, receiver = binding_probe(modules_of(tensors)), binding_probe(modules_of(swapped))
    assert all(torch.equal(trainer[name], receiver[name]) for name in trainer)
    with pytest.raises(WeightsMismatch, match="its binding can't be proven"):
        check(trainer, receiver)
