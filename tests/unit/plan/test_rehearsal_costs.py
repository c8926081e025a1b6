"""Tests of the estimates of rehearsals: cards, batches of tickets, several sizes, and what is counted."""

from collections import Counter

import torch

from async_flowrl.cli.cards import Assumptions, Card, Roofline
from async_flowrl.cli.rehearse import seconds
from async_flowrl.memory.rehearsal.ledger import Allocations, Phase


def test_a_resized_storage_counts_at_its_new_size() -> None:
    before = torch.empty(1000, dtype=torch.uint8)
    with Allocations() as counted:
        made = torch.empty(4000, dtype=torch.uint8)
        made.untyped_storage().resize_(0)
        assert (counted.live, counted.peak) == (0, 4000)
        made.untyped_storage().resize_(6000)
        before.untyped_storage().resize_(0)
        assert (counted.live, counted.peak) == (5000, 6000)
        del made
        assert counted.live == -1000
    own = torch.UntypedStorage.resize_
    assert "Allocations" not in own.__qualname__


def test_a_kernel_takes_the_larger_of_arithmetic_traffic_and_its_launch() -> None:
    card = Card("slow", 1e9, bfloat16=1e12, float32=1e11, bandwidth=1e9, links=1e9)
    roofline = Roofline(card, Assumptions(1.0, 1.0, 1.0, 1e-6, 1.0, 1e9, 1e9))
    assert roofline.kernel(2e12, 0, torch.bfloat16) == 2.0
    assert roofline.kernel(2e11, 0, torch.float32) == 2.0
    assert roofline.kernel(1.0, 3_000_000_000, torch.bfloat16) == 3.0
    assert roofline.kernel(0.0, 8, None) == 1e-6
    assert roofline.delivery(10**9) == 2 + 2 + 1
    assert roofline.delivery(10**9, 10**9) == 2 + 2 + 1 and roofline.delivery(10**9, 10**9 // 4) == 0.5 + 1
    phase = Phase("phase", kernels=Counter({(2e12, 0, torch.bfloat16): 3, (1.0, 2_000_000_000, None): 2}))
    assert seconds(phase, roofline) == 3 * 2.0 + 2 * 2.0
    assert phase.flops == 6e12 + 2
