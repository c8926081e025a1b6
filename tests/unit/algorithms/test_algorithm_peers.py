"""Tests of losses on final images against Flow-Factory's own trainers: value and gradient for the same tensors."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from async_flowrl.algorithms.base import detached
from async_flowrl.algorithms.registry import build_algorithm
from async_flowrl.config.schema import AlgorithmConfig, Config, RewardTerm
from async_flowrl.training.forward_passes import means_of_levels
from tests.support.peer_losses import CASES, EXPECTED, IMAGES, LEVELS, REWARDS, WEIGHTS, inputs
from tests.unit.algorithms.algorithm_cases import build, frozen

ALL: dict[str, Any] = json.loads(EXPECTED.read_text())
RECORDED = ALL["cases"]


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_are_those_of_the_peer(case: str) -> None:
    name, ours, _ = CASES[case]
    algorithm: Any = build(name=name, **ours)
    batch, networks = inputs()
    current = algorithm.predict(batch, networks["current"])
    others = {needed: algorithm.predict(batch, frozen(networks[needed])) for needed in algorithm.needs}
    if hasattr(algorithm, "group_terms"):
        terms = algorithm.group_terms(batch, detached(current), others)
        batch = replace(batch, group_means=means_of_levels(batch, terms))
    output = algorithm.loss(batch, current, others)
    losses, gradients = RECORDED[case]
    assert output.loss.reshape(IMAGES, LEVELS).mean(dim=0).tolist() == pytest.approx(losses, rel=1e-5, abs=1e-6)
    got = torch.autograd.grad(output.loss.sum() / IMAGES, list(networks["current"].parameters()))
    for value, expected in zip(got, map(torch.tensor, gradients), strict=True):
        assert torch.allclose(value, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_gdpo_advantages_are_those_of_the_peer() -> None:
    algorithm = build(combine="gdpo")
    assert not algorithm.group_local
    rewards = {name: [np.array(group) for group in groups] for name, groups in REWARDS.items()}
    found = np.concatenate(algorithm.advantages(rewards, weights=WEIGHTS))
    assert found == pytest.approx(ALL["gdpo"], abs=1e-5) and found.std() == pytest.approx(1.0)
    with pytest.raises(ValueError, match="hand_over=batch"):
        build(combine="gdpo", hand_over="stream")


def test_every_case_is_recorded() -> None:
    assert RECORDED.keys() == CASES.keys()


def test_gdpo_needs_every_reward_of_a_group() -> None:
    config = Config(algorithm=AlgorithmConfig(combine="gdpo"), hand_over="batch")
    config.reward.terms = {"color": RewardTerm(), "judge": RewardTerm(required=False)}
    with pytest.raises(ValueError, match=r"reward\.terms\.judge\.required=true"):
        build_algorithm(config)
