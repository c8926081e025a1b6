"""Tests of several tickets in one batch of the reference engine: results and failures are each ticket's own."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from async_flowrl.rollout.diffusers_engine import DiffusersEngine
from async_flowrl.seeds import derive
from async_flowrl.types import Prompt, RolloutRequest
from tests.support.tiny import request, sampling
from tests.unit.rollout.trajectories import trajectory_of

TEXTS = ("red red red red", "a very long prompt about a blue square, a red circle and more", "a hill")


def tickets(cfg: float = 1.0) -> list[RolloutRequest]:
    """Of other prompts, texts of other lengths and other noise."""
    return [
        replace(
            request(2, how=sampling(cfg=cfg), prompt=Prompt(ordinal, text)),
            ordinal=ordinal,
            initial_seeds=(derive(ordinal, "a"), derive(ordinal, "b")),
            noise_seeds=(derive(ordinal, "c"), derive(ordinal, "d")),
        )
        for ordinal, text in enumerate(TEXTS)
    ]


@pytest.mark.parametrize(("cfg", "chunk"), [(1.0, None), (4.0, None), (4.0, 1)])
def test_tickets_of_a_batch_are_what_they_are_alone(policy: Any, cfg: float, chunk: int | None) -> None:
    engine = DiffusersEngine(policy, batch_size=chunk)
    made = engine.generate(tickets(cfg))
    for one, ticket in zip(made, tickets(cfg), strict=True):
        expected = trajectory_of(engine.generate([ticket])[0])
        assert np.abs(trajectory_of(one).latents - expected.latents).max() < 1e-5
        assert np.abs(trajectory_of(one).log_probs - expected.log_probs).max() < 1e-5
        assert np.array_equal(trajectory_of(one).conditioning["prompt_embeds"], expected.conditioning["prompt_embeds"])
    for one, again in zip(made, engine.generate(tickets(cfg)), strict=True):
        assert np.array_equal(one.images, again.images)
        assert np.array_equal(trajectory_of(one).latents, trajectory_of(again).latents)


def test_a_ticket_that_fails_is_named_and_leaves_the_engine_whole(policy: Any) -> None:
    engine, asked = DiffusersEngine(policy), tickets()
    wrong = replace(asked[1], train_steps=(5,), noise_steps=(1,))
    with pytest.raises(ValueError, match=r"request of ticket 1: train_steps \(5,\)"):
        engine.generate([asked[0], wrong, asked[2]])
    assert len(engine.generate(asked)) == 3
