"""Tests of rehearsals on fake tensors: recipes at full size, tiny models of all families, and the memory accounting."""

import json

import pytest
import torch
import torch.distributed as dist

from async_flowrl.cli import plan as planner
from async_flowrl.cli.cards import CARDS
from async_flowrl.cli.rehearse import BOTH, Rehearsal, peak, rehearse
from async_flowrl.config.compose import compose_config
from async_flowrl.config.schema import Config
from async_flowrl.memory.footprints import in_one, plan_memory
from async_flowrl.memory.rehearsal.model import FakeModel
from async_flowrl.memory.rehearsal.rank import RankRehearsal, rehearse_trainer
from async_flowrl.memory.rehearsal.rollout import RolloutRehearsal, rehearse_rollout


def shallow(*overrides: str) -> Config:
    """One layer unless more are given: on fake tensors every operation costs the same, however small its tensors."""
    return compose_config("one_step_off", ["model.tiny.layers=1", *overrides])


def worker_alone(*overrides: str) -> RolloutRehearsal:
    config = shallow(*overrides)
    return rehearse_rollout(config, FakeModel.of(config))


RECIPES = {"qwen_image_ocr": 38.0, "sd35_ocr": 4.6, "flux_pickscore": 22.1}
"""Experiment → GiB of base weights, all of which a rank holds on an H100."""

PHASES = {"load", "settle", "update", "forward", "backward", "optimizer", "delivery"}

ROLLOUT_PHASES = {"load", "delivery", "sample", "encode", "denoise", "decode"}


def rank_alone(*overrides: str) -> RankRehearsal:
    config = shallow(*overrides)
    return rehearse_trainer(config, FakeModel.of(config))


def fits_and_agrees_with_the_plan(done: Rehearsal) -> None:
    assert done.rank.phases.keys() > PHASES and done.rollout.phases.keys() == ROLLOUT_PHASES
    assert all(phase.peak < done.card.memory for phase in done.peaks().values())
    assert 0 < done.estimate.ticket < done.estimate.generation
    plan = plan_memory(done.config)
    for phases, planned in ((done.rank.phases, plan.trainer), (done.rollout.phases, plan.rollout)):
        assert sum(planned.parts.values()) == pytest.approx(peak(phases.values()).peak, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", RECIPES)
def test_the_recipes_are_rehearsed_at_full_size(experiment: str) -> None:
    config = compose_config("one_step_off", [f"experiment={experiment}"])
    done = rehearse(config, CARDS["H100"])
    assert done.rank.phases["load"].peak > RECIPES[experiment] * 2**30
    gradients = done.rank.phases["optimizer"].collectives["allreduce_"]
    assert gradients == pytest.approx(8 * done.rank.sizes.adapter_parameters, rel=1e-3)
    assert done.rank.version_bytes == done.rollout.version_bytes == pytest.approx(gradients / 4, rel=1e-3)
    fits_and_agrees_with_the_plan(done)


@pytest.mark.slow
@pytest.mark.parametrize(("experiment", "shared_by"), [("qwen_image_ocr_full", 8), ("sd35_medium_full", 1)])
def test_the_recipes_of_whole_models_are_rehearsed_at_full_size(experiment: str, shared_by: int) -> None:
    done = rehearse(compose_config("one_step_off", [f"experiment={experiment}"]), CARDS["H200"])
    rank = done.rank
    assert rank.sizes.adapter_parameters == rank.sizes.base_parameters, "all of it is trained"
    assert rank.version_bytes == done.rollout.version_bytes == pytest.approx(2 * rank.sizes.base_parameters, rel=1e-3)
    assert rank.share_bytes == pytest.approx(rank.version_bytes / shared_by, rel=1e-3)
    fits_and_agrees_with_the_plan(done)


@pytest.mark.parametrize("experiment", ["two_prompts", pytest.param("glyphs", marks=pytest.mark.slow)])
def test_the_small_recipes_are_rehearsed(experiment: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert planner.main(["--rehearse", f"experiment={experiment}", "model.tiny.layers=1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] and told["trainer_rank"]["phases"].keys() >= PHASES
    assert told["rollout_worker"]["phases"].keys() == ROLLOUT_PHASES
    assert not dist.is_initialized() and torch.zeros(1).add(1).item() == 1


@pytest.mark.extended
def test_videos_that_begin_with_an_image_are_planned_with_as_many_frames() -> None:
    video = ["model=tiny_wan_image", "rollout.resolution=16"]
    short, long = (rank_alone(*video, f"rollout.frames={frames}") for frames in (5, 9))
    assert [rank.shapes.conditioning["condition"][1] for rank in (short, long)] == [2, 3]
    assert short.phases["backward"].peak < long.phases["backward"].peak
    assert worker_alone(*video, "rollout.frames=5").phases.keys() == ROLLOUT_PHASES


@pytest.mark.slow
def test_a_sharded_base_is_gathered_and_let_go() -> None:
    """FSDP2 frees what it gathers by resizing its storage to nothing; it holds two of three blocks whole at once."""
    given = ["model.tiny.layers=3", "trainer.num_workers=4", "trainer.micro_batch_size=2"]
    given += ["rollout.resolution=16", "algorithm.correction=none"]
    whole, sharded = (rank_alone(*given, f"trainer.shard={shard}") for shard in ("none", "full"))
    assert sharded.layout == "fsdp2 over 4" and whole.layout == "whole on each of 4"
    weights = 4 * whole.sizes.base_parameters
    saved = whole.phases["forward"].resident - sharded.phases["forward"].resident
    assert saved == pytest.approx(weights * 3 / 4, rel=0.25)
    assert peak(sharded.phases.values()).peak < peak(whole.phases.values()).peak
    gathered = sharded.phases["forward"].collectives["_allgather_base_"] / sharded.phases["forward"].entered
    assert gathered == pytest.approx(weights, rel=0.1)
    assert whole.phases["forward"].sent == 0
    assert sharded.phases["optimizer"].sent == pytest.approx(2 * 3 / 4 * 2 * sharded.version_bytes, rel=0.01)


@pytest.mark.extended
def test_loading_whole_weights_never_holds_them_twice_on_the_device() -> None:
    """With the versions in host memory a device has no room for a second copy at any time."""
    worker = worker_alone("tune=full", "model.tiny.layers=2", "model.tiny.heads=16")
    load = worker.phases["load"]
    assert load.resident < worker.phases["denoise"].resident < 1.5 * worker.version_bytes
    assert load.peak < 1.05 * worker.phases["denoise"].resident


@pytest.mark.extended
def test_an_offloaded_encoder_counts_only_while_it_encodes() -> None:
    usual = rehearse(shallow(), CARDS["H100"])
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


@pytest.mark.slow
def test_a_process_that_samples_and_trains_holds_the_base_once() -> None:
    """In the shape of experiment=qwen_image_1x80gb, with a base that is most of what is held; also by the plan."""
    given = ["model.tiny.layers=2", "model.tiny.heads=16", "rollout.resolution=16", "lora.rank=2", "ticket_size=4"]
    given += ["rollout.text_encoder=cached", "rollout.batch_size=2", "trainer.micro_batch_size=1"]
    separate, shared = (
        rehearse(compose_config("one_step_off", [*given, f"placement={where}"]), CARDS["H100"])
        for where in ("separate", "shared")
    )
    rank, worker = separate.peaks()["trainer rank"].peak, separate.peaks()["rollout worker"].peak
    peaks = shared.peaks()
    assert peaks.keys() == {BOTH} and shared.rank.frozen_bytes > 0.4 * rank
    assert max(rank, worker) < peaks[BOTH].peak <= rank + worker - shared.rank.frozen_bytes
    plan = plan_memory(shared.config)
    both = sum(in_one(plan.trainer, plan.rollout, full=False).parts.values())
    assert both == pytest.approx(peaks[BOTH].peak, rel=0.1)
