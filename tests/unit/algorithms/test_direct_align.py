"""Tests of Direct-Align: the image that is scored, the gradient, and what does not fit it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from async_flowrl.algorithms.base import draw
from tests.unit.algorithms.algorithm_cases import SIGMAS, Network, build, check_gradient, final_rows

STEPS = range(5)


def score(latents: Tensor) -> Tensor:
    return latents.flatten(1).square().mean(dim=1)


def test_value_and_gradient_are_those_of_the_papers_formulas() -> None:
    """In float64, row by row: one Euler step to the next level, then the known noise is taken out."""
    algorithm, network = build(name="direct_align"), Network(3, seed=1)
    batch = replace(final_rows(1, 5, [1.0]), score=score)
    loss = algorithm.loss(batch, algorithm.predict(batch, network), {}).loss
    noise, total = draw(batch, batch.seeds)[0].double(), torch.zeros((), dtype=torch.float64)
    for row, step in enumerate(STEPS):
        s, r, x0 = SIGMAS[step], SIGMAS[step + 1], batch.latents[row].double()
        x = (1 - s) * x0 + s * noise[row]
        v = torch.tanh(x @ network.w.double() + s * network.u.double())
        total = total - (((x + (r - s) * v) - r * noise[row]) / (1 - r)).square().mean()
    assert loss.sum().item() == pytest.approx(total.item(), rel=1e-5)
    check_gradient(loss, total, network, rtol=1e-5, atol=1e-5)


def test_every_image_is_trained_and_a_negated_reward_turns_the_loss_around() -> None:
    batch = replace(final_rows(1, 5, [1.0]), score=score)
    losses = []
    for negate in (False, True):
        algorithm = build(name="direct_align", negate_reward=negate)
        rewards = {"a": [np.array([0.5]), np.array([0.5, 0.5])]}
        assert [group.tolist() for group in algorithm.advantages(rewards)] == [[1.0], [1.0, 1.0]]
        losses.append(algorithm.loss(batch, algorithm.predict(batch, Network(3, seed=1)), {}).loss)
    assert torch.equal(losses[0], -losses[1])
    assert not algorithm.vanishes_at_zero


@pytest.mark.parametrize(
    "fields", [{"normalise": "none"}, {"global_std": True}, {"permute_advantages": True}, {"adv_clip_max": 2.0}]
)
def test_settings_of_advantages_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"algorithm.{next(iter(fields))}=.*direct_align"):
        build(name="direct_align", **fields)


def test_without_a_reward_the_loss_says_so() -> None:
    algorithm, batch = build(name="direct_align"), final_rows(1, 5, [1.0])
    with pytest.raises(ValueError, match="score"):
        algorithm.loss(batch, algorithm.predict(batch, Network(3, seed=1)), {})
