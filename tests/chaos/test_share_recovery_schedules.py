"""Tests of runs whose trainer ranks have a share of the weights each: deaths and damaged shares change no bit."""

from collections import Counter
from collections.abc import Callable

import pytest

from tests.chaos.share_recovery_schedules import PAIRS, outcome, report

pytestmark = pytest.mark.chaos

FIRST = len(PAIRS)
SEEDS = 16 * FIRST
"""Of `make test-slow`; `make test` runs the first ones, one for each cell."""


@pytest.mark.parametrize("seeds", [FIRST, pytest.param(SEEDS, marks=pytest.mark.slow)])
def test_every_run_goes_on_from_the_last_sound_checkpoint(
    seeds: int, record_property: Callable[[str, object], None]
) -> None:
    """`python -m tests.chaos.share_recovery_schedules 0 336` prints the table."""
    ended = [outcome(seed) for seed in range(seeds)]
    record_property("coverage", report(ended))
    assert [(each.seed, each.wrong) for each in ended if each.wrong] == []
    hits = Counter(hit for each in ended for hit in set(each.hits))
    assert {pair: hits[pair] for pair in PAIRS if hits[pair] < 0.75 * seeds / len(PAIRS)} == {}
