"""Tests of rehearsals of `placement=shared`: one process that samples and trains, in the shape of a recipe."""

from functools import cache

import pytest

from async_flowrl.cli.cards import CARDS
from async_flowrl.cli.rehearse import BOTH, Rehearsal, rehearse
from async_flowrl.config.compose import compose_config
from async_flowrl.memory.footprints import in_one, plan_memory

ONE_CARD = ("rollout.text_encoder=cached", "rollout.batch_size=2", "trainer.micro_batch_size=1", "ticket_size=4")
"""Of experiment=qwen_image_1x80gb."""
WIDE = ("model.tiny.heads=16", "rollout.resolution=16", "lora.rank=2")
"""The base is most of what is held, as in a large model."""


@cache
def rehearsed(*overrides: str) -> Rehearsal:
    given = ["model.tiny.layers=2", *WIDE, *ONE_CARD, *overrides]
    return rehearse(compose_config("one_step_off", given), CARDS["H100"])


@pytest.mark.slow
def test_a_process_that_samples_and_trains_holds_the_base_once() -> None:
    """By the plan, too, which counts without the operations."""
    shared, separate = rehearsed("placement=shared"), rehearsed()
    rank, worker = separate.peaks()["trainer rank"].peak, separate.peaks()["rollout worker"].peak
    peaks = shared.peaks()
    assert peaks.keys() == {BOTH} and shared.rank.frozen_bytes > 0.4 * rank
    assert max(rank, worker) < peaks[BOTH].peak <= rank + worker - shared.rank.frozen_bytes
    plan = plan_memory(shared.config)
    assert sum(in_one(plan.trainer, plan.rollout, full=False).parts.values()) == pytest.approx(
        peaks[BOTH].peak, rel=0.1
    )


@pytest.mark.slow
def test_whole_weights_that_are_trained_are_there_twice() -> None:
    shared = rehearsed("placement=shared", "tune=full", "max_staleness=0")
    held = shared.rank.phases["update"].resident + shared.rollout.phases["sample"].resident
    assert shared.rank.frozen_bytes == 0 and shared.peaks()[BOTH].peak >= held
