"""Tests of the prompt sampler: a pure function that visits every prompt once per epoch."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_flowrl.data.sampler import Sampler


@pytest.mark.extended
@settings(deadline=None)
@given(
    num_prompts=st.integers(1, 40),
    prompts_per_step=st.integers(1, 13),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
)
def test_every_prompt_comes_once_per_epoch(num_prompts: int, prompts_per_step: int, seed: int, shuffle: bool) -> None:
    steps = range(2 * num_prompts)
    sampler = Sampler(num_prompts, prompts_per_step, seed=seed, shuffle=shuffle)
    drawn = [index for step in steps for index in sampler.step(step)]
    for start in range(0, len(drawn), num_prompts):
        assert sorted(drawn[start : start + num_prompts]) == list(range(num_prompts))
    assert set(Counter(drawn).values()) == {2 * prompts_per_step}


def test_without_shuffling_prompts_come_in_file_order() -> None:
    sampler = Sampler(3, 2, seed=0, shuffle=False)
    assert [sampler.step(step) for step in range(3)] == [(0, 1), (2, 0), (1, 2)]


def test_the_order_is_pinned() -> None:
    """A change of this order would break every resume and every published digest."""
    assert Sampler(8, 8, seed=0, shuffle=True).step(0) == (0, 2, 5, 4, 7, 1, 6, 3)
    sampler = Sampler(8, 3, seed=0, shuffle=True)
    backward = [sampler.step(step) for step in reversed(range(9))]
    assert backward[::-1] == [Sampler(8, 3, seed=0, shuffle=True).step(step) for step in range(9)]


def draws(sampler: Sampler, epochs: int) -> list[Counter[int]]:
    return [Counter(sampler.order(epoch).tolist()) for epoch in range(epochs)]


def test_equal_weights_change_nothing() -> None:
    plain = Sampler(50, 7, seed=3, shuffle=True)
    weighted = Sampler(50, 7, seed=3, shuffle=True, weights=np.full(50, 0.1))
    assert [plain.step(step) for step in range(30)] == [weighted.step(step) for step in range(30)]


def test_a_weight_is_a_share_of_the_draws_of_every_epoch_and_exactly_that_on_average() -> None:
    weights = np.array([0.0, 1.0, 1.0, 2.0, 4.5, 0.0])
    sampler = Sampler(6, 4, seed=1, shuffle=True, weights=weights)
    by_epoch = draws(sampler, 400)
    shares = 6 * weights / weights.sum()
    for counts in by_epoch:
        assert sum(counts.values()) == 6
        assert all(int(share) <= counts[index] <= int(share) + (share % 1 > 0) for index, share in enumerate(shares))
    means = [sum(counts[index] for counts in by_epoch) / len(by_epoch) for index in range(6)]
    assert means == pytest.approx(list(shares), abs=0.07)
    again = Sampler(6, 4, seed=1, shuffle=True, weights=weights)
    assert [again.step(step) for step in range(20)] == [sampler.step(step) for step in range(20)]


def test_an_epoch_of_some_prompts_keeps_their_order() -> None:
    sampler, kept = Sampler(30, 4, seed=5, shuffle=True), np.arange(30) % 3 > 0
    assert sampler.order(2, kept).tolist() == [index for index in sampler.order(2).tolist() if kept[index]]
    weighted = Sampler(30, 4, seed=5, shuffle=True, weights=np.ones(30))
    assert sorted(weighted.order(2, kept).tolist()) == np.flatnonzero(kept).tolist()
    assert weighted.order(2, np.zeros(30, np.bool_)).tolist() == []
