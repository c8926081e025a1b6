"""The prompt sampler is a pure function that visits every prompt once per epoch."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_flowrl.data.sampler import prompts_for_step


@given(
    num_prompts=st.integers(1, 40),
    prompts_per_step=st.integers(1, 13),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
)
def test_every_prompt_comes_once_per_epoch(num_prompts: int, prompts_per_step: int, seed: int, shuffle: bool) -> None:
    steps = range(2 * num_prompts)
    drawn = [
        index
        for step in steps
        for index in prompts_for_step(num_prompts, prompts_per_step, seed=seed, step=step, shuffle=shuffle)
    ]
    for start in range(0, len(drawn), num_prompts):
        assert sorted(drawn[start : start + num_prompts]) == list(range(num_prompts))
    assert set(Counter(drawn).values()) == {2 * prompts_per_step}


def test_a_step_does_not_depend_on_the_steps_before() -> None:
    forward = [prompts_for_step(100, 8, seed=1, step=step, shuffle=True) for step in range(50)]
    backward = [prompts_for_step(100, 8, seed=1, step=step, shuffle=True) for step in reversed(range(50))]
    assert forward == backward[::-1]


def test_epochs_and_seeds_differ() -> None:
    orders = {
        tuple(prompts_for_step(20, 20, seed=seed, step=step, shuffle=True)) for seed in range(4) for step in range(4)
    }
    assert len(orders) == 16


def test_without_shuffling_prompts_come_in_file_order() -> None:
    assert [prompts_for_step(3, 2, seed=0, step=step, shuffle=False) for step in range(3)] == [[0, 1], [2, 0], [1, 2]]


def test_the_order_is_pinned() -> None:
    """A change of this order would break every resume and every published digest."""
    assert prompts_for_step(8, 8, seed=0, step=0, shuffle=True) == [0, 2, 5, 4, 7, 1, 6, 3]


def test_no_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="num_prompts=0"):
        prompts_for_step(0, 2, seed=0, step=0, shuffle=True)
