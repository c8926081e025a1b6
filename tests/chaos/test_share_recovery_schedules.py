"""Tests of runs whose trainer ranks have a share of the weights each: deaths and damaged shares change no bit."""

from collections import Counter

import pytest

from tests.chaos.share_recovery_schedules import PAIRS, outcome

pytestmark = pytest.mark.chaos

SEEDS = range(5 * len(PAIRS))
"""Of `make test-slow`, five for each cell."""
FEW = SEEDS[: len(PAIRS) : 2]
"""Of `make test`, one for every second cell; tests/unit/test_share_recovery.py has some more."""


@pytest.mark.parametrize("seeds", [FEW, pytest.param(SEEDS, marks=pytest.mark.slow)], ids=len)
def test_every_run_goes_on_from_the_last_sound_checkpoint(seeds: range) -> None:
    """`python -m tests.chaos share_recovery_schedules 0 130` prints the table."""
    ended = [outcome(seed) for seed in seeds]
    assert [(each.seed, each.wrong) for each in ended if each.wrong] == []
    hits = Counter(hit for each in ended for hit in set(each.hits))
    due = Counter(PAIRS[seed % len(PAIRS)] for seed in seeds)
    assert {pair: hits[pair] for pair in PAIRS if hits[pair] < due[pair]} == {}
