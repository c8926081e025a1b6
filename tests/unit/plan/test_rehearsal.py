"""Tests of rehearsals on fake tensors: recipes at full size, tiny models of all families, and the memory accounting."""

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.plan import __main__ as planner
from async_flowrl.plan.arguments import costs
from async_flowrl.plan.footprint import Allocations
from async_flowrl.plan.laws import Law
from async_flowrl.plan.memory import plan_memory
from async_flowrl.plan.rehearsal import by_card
from async_flowrl.plan.rehearsal.cards import Assumptions, Card, Roofline, card_of
from async_flowrl.plan.rehearsal.command import rehearse
from async_flowrl.plan.rehearsal.estimate import estimate, peak
from async_flowrl.plan.rehearsal.ledger import Ledger, Phase
from async_flowrl.plan.rehearsal.model import FakeModel
from async_flowrl.plan.rehearsal.report import Rehearsal, describe
from async_flowrl.plan.rehearsal.rollout import RolloutRehearsal, rehearse_rollout
from async_flowrl.plan.rehearsal.trainer import RankRehearsal, _counts, rehearse_trainer
from async_flowrl.plan.size_costs import SizeCosts, size_costs, size_shares
from async_flowrl.plan.work import Work
from async_flowrl.tickets.arithmetic import trained_steps
from async_flowrl.training.parts import RankPosition

FAMILIES = {"tiny": (), "tiny_sd3": (), "tiny_z_image": (), "tiny_flux": ("rollout.guidance_scale=3.5",)}
RECIPES = {"qwen_image_ocr": 38.0, "sd35_ocr": 4.6, "flux_pickscore": 22.1}
"""Experiment → GiB of base weights, all of which a rank holds on an H100."""
PHASES = {"load", "settle", "update", "forward", "backward", "optimizer", "delivery"}
ROLLOUT_PHASES = {"load", "delivery", "sample", "encode", "denoise", "decode"}


FOUR_RANKS = ("model.tiny.layers=3", "trainer.num_workers=4", "trainer.micro_batch_size=2", "rollout.resolution=16")
"""Three blocks, because FSDP2 holds two of them whole at once; tests of it leave out the passes of a correction."""
NO_CORRECTION = "algorithm.correction=none"


def shallow(*overrides: str) -> Config:
    """One layer unless more are given: on fake tensors every operation costs the same, however small its tensors."""
    return compose_config("one_step_off", ["model.tiny.layers=1", *overrides])


@cache
def rehearsed(*overrides: str, card: str = "H100") -> Rehearsal:
    return rehearse(shallow(*overrides), card_of(card))


def rank_alone(*overrides: str) -> RankRehearsal:
    config = shallow(*overrides)
    return rehearse_trainer(config, FakeModel.of(config), card_of("H100"))


def worker_alone(*overrides: str) -> RolloutRehearsal:
    config = shallow(*overrides)
    return rehearse_rollout(config, FakeModel.of(config), card_of("H100"))


def agrees_with_the_plan(done: Rehearsal) -> None:
    plan = plan_memory(done.config)
    for phases, planned in ((done.rank.phases, plan.trainer), (done.rollout.phases, plan.rollout)):
        assert sum(planned.parts.values()) == pytest.approx(peak(phases.values()).peak, rel=0.1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("experiment", RECIPES)
def test_the_recipes_are_rehearsed_at_full_size(experiment: str) -> None:
    config = compose_config("one_step_off", [f"experiment={experiment}"])
    done = rehearse(config, card_of("H100"))
    assert done.rank.phases.keys() > PHASES and done.rollout.phases.keys() == ROLLOUT_PHASES
    assert done.rank.phases["load"].peak > RECIPES[experiment] * 2**30
    assert all(phase.peak < done.roofline.card.memory for phase in done.peaks().values())
    gradients = done.rank.phases["optimizer"].collectives["allreduce_"]
    assert gradients == pytest.approx(8 * done.rank.adapter_parameters, rel=1e-3)
    assert done.rank.version_bytes == done.rollout.version_bytes == pytest.approx(gradients / 4, rel=1e-3)
    assert 0 < done.estimate.ticket < done.estimate.generation
    agrees_with_the_plan(done)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("experiment", "shared_by"), [("qwen_image_ocr_full", 8), ("sd35_medium_full", 1)])
def test_the_recipes_of_whole_models_are_rehearsed_at_full_size(experiment: str, shared_by: int) -> None:
    done = rehearse(compose_config("one_step_off", [f"experiment={experiment}"]), card_of("H200"))
    rank = done.rank
    assert rank.phases.keys() > PHASES and done.rollout.phases.keys() == ROLLOUT_PHASES
    assert rank.adapter_parameters == rank.base_parameters, "all of it is trained"
    assert rank.version_bytes == done.rollout.version_bytes == pytest.approx(2 * rank.base_parameters, rel=1e-3)
    assert rank.share_bytes == pytest.approx(rank.version_bytes / shared_by, rel=1e-3)
    assert all(phase.peak < done.roofline.card.memory for phase in done.peaks().values())
    assert 0 < done.estimate.ticket < done.estimate.generation
    agrees_with_the_plan(done)


@pytest.mark.parametrize("experiment", ["two_prompts", pytest.param("glyphs", marks=pytest.mark.slow)])
def test_the_small_recipes_are_rehearsed(experiment: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert planner.main(["--rehearse", f"experiment={experiment}", "model.tiny.layers=1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] and told["trainer_rank"]["phases"].keys() >= PHASES
    assert told["rollout_worker"]["phases"].keys() == ROLLOUT_PHASES
    assert not dist.is_initialized() and torch.zeros(1).add(1).item() == 1


@pytest.mark.slow
@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("algorithm", ["flow_grpo", "diffusion_nft", "dpo"])
def test_all_families_and_kinds_of_algorithms_are_rehearsed(model: str, algorithm: str) -> None:
    done = rehearsed(f"model={model}", f"algorithm={algorithm}", *FAMILIES[model])
    assert min(done.rank.phases[name].flops for name in ("forward", "backward")) > 0
    assert done.rollout.phases["denoise"].flops > 0


@pytest.mark.slow
def test_a_sharded_base_is_gathered_and_let_go() -> None:
    """FSDP2 frees what it gathers by resizing its storage to nothing."""
    whole, sharded = (rank_alone(*FOUR_RANKS, NO_CORRECTION, f"trainer.shard={shard}") for shard in ("none", "full"))
    assert sharded.layout == "fsdp2 over 4" and whole.layout == "whole on each of 4"
    weights = 4 * whole.base_parameters
    saved = whole.phases["forward"].resident - sharded.phases["forward"].resident
    assert saved == pytest.approx(weights * 3 / 4, rel=0.25)
    assert peak(sharded.phases.values()).peak < peak(whole.phases.values()).peak
    gathered = sharded.phases["forward"].collectives["_allgather_base_"] / sharded.phases["forward"].entered
    assert gathered == pytest.approx(weights, rel=0.1)
    assert whole.phases["forward"].sent == 0
    assert sharded.phases["optimizer"].sent == pytest.approx(2 * 3 / 4 * 2 * sharded.version_bytes, rel=0.01)


def test_shares_of_the_whole_model_are_rehearsed() -> None:
    """Each of four ranks has a quarter of what is trained, gathers blocks, and reduces their gradients in float32."""
    small = ("tune=full", *FOUR_RANKS, NO_CORRECTION, "checkpoint_engine.bucket_bytes=262144")
    done = rehearsed(*small, "trainer.shard=full")
    shares, whole = done.rank, rank_alone(*small, "trainer.shard=none")
    assert shares.layout == "fsdp2 over 4, trained weights and optimizer with it"
    assert shares.version_bytes == whole.version_bytes == whole.share_bytes
    assert shares.share_bytes == pytest.approx(shares.version_bytes / 4, rel=0.02)
    held = shares.phases["forward"].resident / whole.phases["forward"].resident
    # With shares there are copies of the masters for FSDP2, but no second sum of the gradients.
    assert held == pytest.approx(1 / 4, rel=0.15)
    once = {name: Counter(shares.phases[name].collectives) for name in ("forward", "backward", "optimizer")}
    trained = 4 * shares.adapter_parameters
    assert once["forward"]["_allgather_base_"] == pytest.approx(trained, rel=0.1)
    assert once["backward"]["_reduce_scatter_base_"] == pytest.approx(trained, rel=0.1)
    assert once["optimizer"]["allreduce_"] < 0.01 * trained < whole.phases["optimizer"].collectives["allreduce_"]
    plan = plan_memory(done.config)
    assert 0.8 < peak(shares.phases.values()).peak / sum(plan.trainer.parts.values()) < 1
    assert sum(plan.rollout.parts.values()) == pytest.approx(peak(done.rollout.phases.values()).peak, rel=0.1)
    assert f"{shares.share_bytes / 1e6:.0f} MB of it on each rank" in describe(done)
    given, found = done.config, done.estimate
    assert found.activation == pytest.approx(done.rollout.version_bytes / done.roofline.given.host_bytes_per_second)
    tickets = given.prompts_per_step * given.group_size / given.images_per_ticket / given.rollout.num_workers
    assert found.generation == pytest.approx(tickets * found.ticket + found.activation), "once for each step"


def test_a_rollout_worker_takes_a_version_in_shares_as_it_takes_a_whole_one() -> None:
    full = ("tune=full", "trainer.num_workers=2", "trainer.micro_batch_size=2", "rollout.versions_on=device")
    shares, whole = (worker_alone(*full, f"trainer.shard={shard}") for shard in ("full", "none"))
    assert shares.version_bytes == whole.version_bytes
    held = shares.phases["denoise"].resident  # but for some numbers that are made once in a process
    assert held == pytest.approx(whole.phases["denoise"].resident, rel=1e-5) and held > 4 * shares.version_bytes
    assert shares.phases["delivery"].peak == pytest.approx(whole.phases["delivery"].peak, rel=0.01)


def test_loading_whole_weights_never_holds_them_twice_on_the_device() -> None:
    """With the versions in host memory a device has no room for a second copy at any time."""
    worker = worker_alone("tune=full", "model.tiny.layers=2", "model.tiny.heads=16")
    load = worker.phases["load"]
    assert load.resident < worker.phases["denoise"].resident < 1.5 * worker.version_bytes
    assert load.peak < 1.05 * worker.phases["denoise"].resident


def test_an_offloaded_encoder_counts_only_while_it_encodes() -> None:
    usual = rehearsed()
    assert usual.config.rollout.text_encoder == "resident"
    resident, offloaded, cached = (
        usual.rollout.phases,
        *(worker_alone(f"rollout.text_encoder={where}").phases for where in ("offload", "cached")),
    )
    saved = resident["denoise"].resident - offloaded["denoise"].resident
    assert 0 < saved == resident["load"].peak - offloaded["load"].peak
    assert offloaded["encode"].peak - offloaded["encode"].resident == saved
    assert cached["denoise"].resident == offloaded["denoise"].resident
    assert cached["encode"].peak == cached["encode"].resident


def test_the_estimate_says_what_it_takes_for_granted_and_claims_no_observation() -> None:
    said = describe(rehearsed(card="L4"))
    assert "estimated: a ticket of 16 images" in said and "takes for granted" in said and "L4" in said
    assert "measured" not in said
    assert " --prompts 2 --group-size 16 --ticket-size 16 --devices 2\n" in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["--card", "H10"],
            "--card must be one of A100, B200, H100, H200, L4, L40S, all, got 'H10'; did you mean 'H100'?",
        ),
        (["rollout.compile=true"], "compiled networks cannot be rehearsed"),
        (["trainer.micro_batch_size=3"], "must divide"),
        (["lora.rank=1000000000"], "too little memory for the rehearsal"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert planner.main(["--rehearse", *given]) == 2
    assert said in capsys.readouterr().err


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
    assert phase.seconds(roofline) == 3 * 2.0 + 2 * 2.0 and phase.arithmetic(roofline) == 3 * 2.0
    assert phase.flops == 6e12 + 2


def test_phases_count_what_happens_in_them() -> None:
    layer = nn.Linear(256, 128, bias=False)
    with Ledger(card_of("H100")) as ledger:
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
    assert by_card.on(card_of("L4"), done).estimate == alone.estimate != done.estimate
    small = replace(card_of("L4"), memory=2**20)
    text = by_card.by_card(done, [card_of("H100"), small])
    assert "H100  yes" in text and "GiB are missing" in text.splitlines()[-1]
    assert [card.name for card in by_card.cards_of("h200, L4")] == ["H200", "L4"]
    assert planner.main(["--rehearse", "--card", "H100,H20"]) == 2
    assert "'H20'; did you mean 'H200'?" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"one of A100, B200, H100, H200, L4, L40S, got 'all'$"):
        by_card.cards_of("all,H100")


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
    assert "--ticket-size 4 --tickets-per-batch 2 --devices 2" in describe(both)
    plan = plan_memory(both.config)
    assert sum(plan.rollout.parts.values()) == pytest.approx(peak(both.rollout.phases.values()).peak, rel=0.1)


def test_several_sizes_are_estimated_by_their_flops(tmp_path: Path) -> None:
    """Half of the groups have a quarter of the pixels; two thirds of the prompts with a size of their own have that."""
    sizes = rehearsed("rollout.resolutions=[32,64]")
    large, small = rehearsed("rollout.resolution=64"), rehearsed()
    assert small.config.rollout.resolution == 32
    assert dict(sizes.sizes.shares) == {32: 0.5, 64: 0.5}
    ratio = small.rollout.phases["denoise"].flops / large.rollout.phases["denoise"].flops
    assert sizes.sizes.costs[32] == pytest.approx(ratio, rel=0.02) and sizes.sizes.costs[64] == 1
    assert sizes.peaks() == large.peaks(), "memory is the largest size's"
    mean = (1 + sizes.sizes.costs[32]) / 2
    for name in ("ticket", "generation", "micro_batch", "ticket_flops", "update_flops"):
        assert getattr(sizes.estimate, name) == pytest.approx(mean * getattr(large.estimate, name)), name
    said = describe(sizes)
    assert f" --costs {sizes.sizes.costs[32]:.3g}:0.5,1:0.5\n" in said
    assert "seconds are means over all sizes in px" in said and f"32 (50%, {sizes.sizes.costs[32]:.2f})" in said
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "red", "resolution": 32}] * 2 + [{"prompt": "blue", "resolution": [32, 48]}, {"prompt": "green"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shares = size_shares(compose_config("one_step_off", [f"data.train={file}", "rollout.resolutions=[32,64]"]))
    assert shares == pytest.approx({32: 0.625, (32, 48): 0.25, 64: 0.125})
    assert SizeCosts(shares, dict.fromkeys(shares, 1.0)).option() == " --costs 1:0.625,1:0.25,1:0.125"


def test_the_option_of_sizes_keeps_their_shares_and_their_mean() -> None:
    """Also shares that are no multiples of each other, and one far below the others."""
    sizes = SizeCosts({32: 0.69, 48: 0.303, 64: 0.007}, {32: 0.25, 48: 0.5, 64: 1.0})
    given, shares = costs(sizes.option().removeprefix(" --costs "))
    assert shares == pytest.approx((0.69, 0.303, 0.007))
    assert given == pytest.approx([each / sizes.mean for each in (0.25, 0.5, 1.0)])
    work = Work(8, Law(1.0), Law(1.0), costs=given, cost_shares=shares)
    drawn = Counter(work.cost(0, step, group) for step in range(1000) for group in range(8))
    assert [drawn[each] / 8000 for each in given] == pytest.approx(shares, abs=0.015)
    assert 0 < drawn[given[2]] < 120


def test_costs_are_those_in_relation_to_the_images_that_are_rehearsed(tmp_path: Path) -> None:
    """These are the largest, also if only evaluations have them. A prompt file that is missing here is left out."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "red", "resolution": 32}\n')
    (tmp_path / "large.jsonl").write_text('{"prompt": "blue", "resolution": 64}\n')

    def costs(evaluation: str) -> SizeCosts:
        given = [f"data.train={tmp_path / 'train.jsonl'}", f"data.evaluation={tmp_path / evaluation}"]
        return size_costs(compose_config("one_step_off", [*given, "rollout.resolution=32"]))

    assert dict(costs("large.jsonl").shares) == {32: 1.0} and costs("large.jsonl").mean < 0.95
    assert "32 (100%, 0." in costs("large.jsonl").sentence()
    assert costs("missing.jsonl").mean == 1
