"""Tests of advantages against plain formulas: constant groups, offsets, several rewards, falsified rewards."""

import statistics

import numpy as np
import pytest

from async_flowrl.algorithms.advantage import GroupAdvantages, compute_advantages, is_constant, permuted
from async_flowrl.config.schema import AlgorithmConfig

GROUPS = [np.array([0.1, 0.5, 0.2]), np.array([3.0, 3.5, 2.0, 8.0])]


def test_group_std() -> None:
    for group, result in zip(GROUPS, compute_advantages({"r": GROUPS}, AlgorithmConfig()), strict=True):
        mean, std = statistics.fmean(group), statistics.pstdev(group)
        assert result.dtype == np.float64
        assert result == pytest.approx([(r - mean) / (std + 1e-4) for r in group], rel=1e-12)


def test_global_std_is_that_of_all_rewards_not_of_the_centred_ones() -> None:
    results = compute_advantages({"r": GROUPS}, AlgorithmConfig(global_std=True))
    std = statistics.pstdev([*GROUPS[0], *GROUPS[1]])
    for group, result in zip(GROUPS, results, strict=True):
        assert result == pytest.approx([(r - statistics.fmean(group)) / (std + 1e-4) for r in group], rel=1e-12)


@pytest.mark.parametrize("global_std", [False, True])
def test_dr_grpo_only_centres(global_std: bool) -> None:
    results = compute_advantages({"r": GROUPS}, AlgorithmConfig(normalise="none", global_std=global_std))
    for group, result in zip(GROUPS, results, strict=True):
        assert result == pytest.approx(list(group - statistics.fmean(group)), abs=1e-15)


@pytest.mark.parametrize("fields", [{}, {"global_std": True}, {"normalise": "none"}, {"combine": "per_reward"}])
def test_constant_groups_are_exactly_zero(fields: dict[str, object]) -> None:
    for value in (0.0, 0.1, 0.3, 0.7, 21.7, -1e9):
        groups = [np.full(7, value), np.array([0.0, 1.0, 0.5])]
        constant, mixed = compute_advantages({"r": groups}, AlgorithmConfig(**fields))  # type: ignore[arg-type]
        assert (constant == 0.0).all() and (mixed != 0.0).any()
        assert [is_constant(group) for group in groups].count(True) * 2 == len(groups)


def test_whitening_leaves_a_group_of_equal_rewards_at_zero() -> None:
    drawn = np.random.default_rng(0).standard_normal((7, 8))
    groups = [np.full(8, 0.7), *drawn]
    constant, *others = compute_advantages({"r": groups, "s": groups}, AlgorithmConfig(combine="gdpo"))
    assert not constant.any() and np.std([constant, *others]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("count", "trained"),
    [(None, [0, 1, 2, 3, 4, 5]), (6, [0, 1, 2, 3, 4, 5]), (4, [1, 2, 3, 4]), (3, [1, 3, 4]), (2, [1, 4])],
)
def test_the_best_and_the_worst_images_of_a_group_train(count: int | None, trained: list[int]) -> None:
    advantages = np.array([0.1, 2.0, -0.5, 0.4, -1.5, 0.1])
    assert GroupAdvantages(AlgorithmConfig(train_images_per_group=count)).select(advantages) == trained


def test_of_equal_images_the_first_and_the_last_train() -> None:
    assert GroupAdvantages(AlgorithmConfig(train_images_per_group=3)).select(np.zeros(6)) == [0, 1, 5]


def test_weighted_sum_and_per_reward() -> None:
    rewards = {"ocr": [np.array([0.0, 1.0, 1.0])], "size": [np.array([100.0, 300.0, 500.0])]}
    weights = {"ocr": 2.0, "size": 0.01}
    (summed,) = compute_advantages(rewards, AlgorithmConfig(), weights=weights)
    total = [1.0, 5.0, 7.0]
    assert summed == pytest.approx([(r - statistics.fmean(total)) / (statistics.pstdev(total) + 1e-4) for r in total])
    (each,) = compute_advantages(rewards, AlgorithmConfig(combine="per_reward"), weights=weights)

    def normal(values: list[float]) -> list[float]:
        return [(v - statistics.fmean(values)) / (statistics.pstdev(values) + 1e-4) for v in values]

    parts = zip(normal([0.0, 1.0, 1.0]), normal([100.0, 300.0, 500.0]), strict=True)
    assert each == pytest.approx([2.0 * a + 0.01 * b for a, b in parts])


def test_permuted_advantages_are_the_same_values_in_a_seeded_order() -> None:
    config = AlgorithmConfig(permute_advantages=True)
    group = np.arange(16.0) ** 2
    (plain,) = compute_advantages({"r": [group]}, AlgorithmConfig())
    (one,) = compute_advantages({"r": [group]}, config, seeds=[1])
    (again,) = compute_advantages({"r": [group]}, config, seeds=[1])
    (two,) = compute_advantages({"r": [group]}, config, seeds=[2])
    assert sorted(one) == sorted(plain) and (one == again).all() and (one != two).any() and (one != plain).any()
    positions = np.mean([permuted(group, seed) for seed in range(3000)], axis=0)
    assert positions == pytest.approx(np.full(16, group.mean()), rel=0.08)
