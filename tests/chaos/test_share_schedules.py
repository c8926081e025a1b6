"""Hundreds of deliveries of whole weights in shares whose ends die, hang or are damaged: nothing torn is served."""

from functools import cache

import pytest

from tests.chaos.share_schedules import PAIRS, hits, outcome

pytestmark = pytest.mark.chaos

SEEDS, FIRST = 480, 48
"""Of `make test-slow`, and those of them that `make test` runs."""

ended = cache(outcome)


def test_a_calm_delivery_is_whole() -> None:
    assert outcome(0, calm=True).wrong is None


@pytest.mark.parametrize("seeds", [FIRST, pytest.param(SEEDS, marks=pytest.mark.slow)])
def test_every_delivery_is_whole_or_ends_by_name(seeds: int) -> None:
    assert [(seed, ended(seed).wrong) for seed in range(seeds) if ended(seed).wrong is not None] == []


@pytest.mark.parametrize("seeds", [FIRST, pytest.param(SEEDS, marks=pytest.mark.slow)])
def test_every_fault_is_hit_often_enough(seeds: int) -> None:
    found = hits([ended(seed) for seed in range(seeds)])
    assert {pair: found[pair] for pair in PAIRS if found[pair] < seeds // len(PAIRS) // 2} == {}
