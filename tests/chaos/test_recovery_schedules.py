"""Tests of runs whose trainers, controllers and checkpoints fail: each run goes on and ends in the same weights."""

from collections import Counter

import pytest

from tests.chaos.recovery_schedules import PAIRS, fatal, outcome

pytestmark = pytest.mark.chaos

SEEDS, FIRST = 8 * len(PAIRS), len(PAIRS)
"""Of `make test-slow`, and those of them that `make test` runs: 8 and 1 for each cell."""


@pytest.mark.parametrize("seeds", [FIRST, pytest.param(SEEDS, marks=pytest.mark.slow)])
def test_every_run_goes_on_or_ends_by_name_and_every_cell_is_hit(seeds: int) -> None:
    """`python -m tests.chaos recovery_schedules 0 160` prints the table."""
    ended = [outcome(seed) for seed in range(seeds)]
    assert [(each.seed, each.wrong) for each in ended if each.wrong] == []
    min_hits = max(1, seeds // len(PAIRS) // 4)
    hits = Counter(hit for each in ended for hit in set(each.hits))
    assert {pair: hits[pair] for pair in PAIRS if hits[pair] < min_hits} == {}
    survived = Counter(hit for each in ended if each.how == "success" for hit in set(each.hits))
    assert all((survived[pair] == 0) if fatal(*pair) else (survived[pair] >= min_hits) for pair in PAIRS)
