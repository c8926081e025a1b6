"""Tests of the estimates of rehearsals: cards, batches of tickets, several sizes, and what is counted."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from async_flowrl.cli import plan as planner
from async_flowrl.cli.cards import CARDS, Assumptions, Card, Roofline, cards_of
from async_flowrl.cli.rehearse import by_card, describe, estimate, peak, seconds
from async_flowrl.config.compose import compose_config
from async_flowrl.memory.processes import plan_memory
from async_flowrl.memory.rehearsal.ledger import Allocations, Ledger, Phase
from async_flowrl.memory.rehearsal.trainer import _counts
from async_flowrl.tickets.arithmetic import trained_steps
from async_flowrl.training.parts import RankPosition
from tests.unit.plan.rehearsed_runs import rehearsed, shallow, worker_alone


def test_the_estimate_says_what_it_takes_for_granted_and_claims_no_observation() -> None:
    said = describe(rehearsed(card="L4"))
    assert "estimated: a ticket of 16 images" in said and "takes for granted" in said and "L4" in said
    assert "measured" not in said


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


def test_phases_count_what_happens_in_them() -> None:
    layer = nn.Linear(256, 128, bias=False)
    with Ledger() as ledger:
        with ledger.phase("outer"):
            rows = torch.zeros(64, 256)
            with ledger.phase("inner"):
                out = layer(rows)
            kept = torch.zeros(10)
        ledger.moved(-kept.nbytes)
    outer, inner = ledger.phases["outer"], ledger.phases["inner"]
    assert inner.flops == 2 * 64 * 256 * 128 and outer.flops == 0
    assert (inner.resident, inner.peak) == (rows.nbytes, rows.nbytes + out.nbytes)
    assert outer.peak == rows.nbytes + out.nbytes + kept.nbytes
    assert (inner.kernels.total(), outer.kernels.total()) == (1, 2)


def test_the_rank_with_most_parts_decides_how_long_a_step_takes() -> None:
    """Two groups of two parts, each trained at several steps one by one: eight ranks take as long as four.

    Ranks that share the trained weights train one group after the other, so four take as long as two.
    """
    config = compose_config("one_step_off", ["algorithm=diffusion_nft", "prompts_per_step=2", "group_size=4"])
    config.trainer.micro_batch_size, config.trainer.timesteps_per_forward = 2, 1
    steps = trained_steps(config)
    chosen = SimpleNamespace(select=lambda advantages: range(len(advantages)), needs_behaviour=False)
    chosen.needs_reference = True
    found = []
    for by_group in (False, True):
        parts = {"versions": SimpleNamespace(sampling=None), "world": RankPosition(by_group=by_group)}
        worker = cast("Any", SimpleNamespace(algorithm=chosen, **parts))
        for config.trainer.num_workers in (1, 3, 4, 8):
            counts = _counts(worker, config)
            found.append((counts["micro_batches"] / steps, counts["frozen_passes"] / steps))
    assert steps > 1 and found == [(4, 4), (2, 2), (1, 1), (1, 1), (4, 4), (2, 2), (2, 2), (2, 2)]


def test_one_rehearsal_is_priced_on_several_cards(capsys: pytest.CaptureFixture[str]) -> None:
    """What another card's own rehearsal gives, where the base is held in the same way."""
    done, alone = rehearsed(), rehearsed(card="L4")
    assert done.on(CARDS["L4"]).estimate == alone.estimate != done.estimate
    small = replace(CARDS["L4"], memory=2**20)
    text = by_card(done, [CARDS["H100"], small])
    assert "H100  yes" in text and "GiB are missing" in text.splitlines()[-1]
    assert [card.name for card in cards_of("h200, L4")] == ["H200", "L4"]
    assert planner.main(["--rehearse", "--card", "H100,H20"]) == 2
    assert "'H20'; did you mean 'H200'?" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"one of A100, B200, H100, H200, L4, L40S, got 'all'$"):
        cards_of("all,H100")


def test_a_batch_of_tickets_is_rehearsed_as_one_pass() -> None:
    """Two tickets of 4 images have the phases of a ticket of 8 images, but each decodes its own."""
    four, steps = ("ticket_size=4", "rollout.tickets_per_batch=1"), "rollout.num_inference_steps=4"
    both = rehearsed("ticket_size=4", "rollout.tickets_per_batch=2", steps)
    wide, single = worker_alone("ticket_size=8", steps), worker_alone(*four, steps)
    apart = estimate(shallow(*four, steps), both.rank, single, both.roofline)
    assert (both.rollout.rows, both.rollout.tickets, both.rollout.chunks) == (8, 2, 1)
    assert both.rollout.phases["denoise"].peak == pytest.approx(wide.phases["denoise"].peak, rel=1e-4)
    assert both.rollout.phases["denoise"].flops == 2 * single.phases["denoise"].flops
    assert both.rollout.phases["decode"].peak < wide.phases["decode"].peak
    assert both.estimate.ticket_flops == pytest.approx(apart.ticket_flops)
    assert both.estimate.ticket < apart.ticket, "fewer launches of kernels"
    assert "2 of 4 forward passes of a batch of 2 tickets" in describe(both)
    plan = plan_memory(both.config)
    assert sum(plan.rollout.parts.values()) == pytest.approx(peak(both.rollout.phases.values()).peak, rel=0.1)


def test_several_sizes_are_estimated_as_the_largest() -> None:
    sizes, large = rehearsed("rollout.resolutions=[32,64]"), rehearsed("rollout.resolution=64")
    assert sizes.peaks() == large.peaks() and sizes.estimate == large.estimate
