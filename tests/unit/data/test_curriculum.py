"""Tests of data.curriculum: the prompts that it leaves out, their return, and that only certain outcomes decide."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_flowrl.config.schema import CurriculumConfig
from async_flowrl.data.sampler import NO_SPREAD, SPREAD, Curriculum, Sampler, read_outcomes


def curriculum(
    prompts: int, per_step: int, *, lag: int = 1, after: int = 1, skip_epochs: int = 1, outcomes: bytes = b""
) -> Curriculum:
    sampler = Sampler(prompts, per_step, seed=0, shuffle=True)
    return Curriculum(CurriculumConfig(after, skip_epochs), sampler, lag=lag, outcomes=outcomes)


def train(found: Curriculum, steps: int, dull: set[int], *, first: int = 0) -> list[tuple[int, ...]]:
    """Every step is chosen and trained; groups of the prompts in `dull` have no spread."""
    chosen = []
    for step in range(first, first + steps):
        chosen.append(found.choice(step).prompts)
        found.record(step, [NO_SPREAD if prompt in dull else SPREAD for prompt in chosen[-1]])
    return chosen


def test_a_dull_prompt_is_left_out_and_comes_back_once_at_a_time() -> None:
    """One prompt per step and no lag: an epoch's decision knows all of the epoch before."""
    found = curriculum(4, 1, skip_epochs=2)
    drawn = [step[0] for step in train(found, 4 + 3 + 3 + 4 + 3, {2})]
    epochs = [drawn[:4], drawn[4:7], drawn[7:10], drawn[10:14], drawn[14:]]
    assert [2 in epoch for epoch in epochs] == [True, False, False, True, False]
    assert all(set(epoch) | {2} == {0, 1, 2, 3} for epoch in epochs)
    assert [found.choice(step).set_aside for step in (5, 12, 16)] == [1, 0, 1]


def test_only_steps_that_are_surely_trained_count() -> None:
    """With lag 3 the outcome of step s is used from step s + 3 on, and asking earlier is refused."""
    found = curriculum(2, 2, lag=3)
    ahead = [found.choice(step) for step in range(3)]
    assert [choice.set_aside for choice in ahead] == [0, 0, 0]
    with pytest.raises(RuntimeError, match="step 3 were asked for before step 0 was trained"):
        found.choice(3)
    dull = ahead[0].prompts[0]
    found.record(0, [NO_SPREAD, SPREAD])
    assert found.choice(3).prompts[0] == ahead[0].prompts[1]
    assert dull not in found.choice(3).prompts[:1]


def test_where_every_prompt_is_dull_all_come_back() -> None:
    found = curriculum(3, 2)
    counts = Counter(prompt for step in train(found, 30, {0, 1, 2}) for prompt in step)
    assert set(counts) == {0, 1, 2} and max(counts.values()) - min(counts.values()) <= 2


@pytest.mark.extended
@settings(max_examples=40, deadline=None)
@given(
    prompts=st.integers(1, 8),
    per_step=st.integers(1, 5),
    lag=st.integers(1, 4),
    after=st.integers(1, 3),
    skip=st.integers(1, 3),
    dull=st.sets(st.integers(0, 7)),
    stop=st.integers(0, 20),
)
def test_a_checkpoint_of_the_outcomes_chooses_the_same_prompts(
    prompts: int, per_step: int, lag: int, after: int, skip: int, dull: set[int], stop: int
) -> None:
    def make(outcomes: bytes = b"") -> Curriculum:
        return curriculum(prompts, per_step, lag=lag, after=after, skip_epochs=skip, outcomes=outcomes)

    whole = make()
    straight = train(whole, 30, dull)
    first = make()
    train(first, stop, dull)
    ahead = [first.choice(step).prompts for step in range(stop, stop + lag)]  # tickets that a kill throws away
    again = make(read_outcomes(first.saved()))
    assert straight[stop : stop + lag] == ahead[: 30 - stop]
    assert train(again, 30 - stop, dull, first=stop) == straight[stop:]
