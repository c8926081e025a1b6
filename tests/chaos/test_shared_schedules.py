"""Tests of fault schedules with `placement=shared`: each run ends in the undisturbed weights or with a named error."""

from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest

from tests.chaos.fault_schedules import Ended
from tests.chaos.shared_schedules import MODES, PAIRS, PER_CELL, make_schedule, outcome, report

pytestmark = pytest.mark.chaos

SEEDS, FIRST = PER_CELL * len(PAIRS), len(PAIRS)
"""Of `make test-slow`, and those of them that `make test` runs."""
CHUNK = len(PAIRS)
EXTRA: tuple[int, ...] = ()
"""Seeds beyond these that failed once: they stay."""

ended = cache(outcome)


@pytest.mark.parametrize(
    "first", [pytest.param(n, marks=pytest.mark.slow if n >= FIRST else ()) for n in range(0, SEEDS, CHUNK)]
)
def test_every_run_goes_on_or_ends_by_name(first: int) -> None:
    wrong = [(seed, ended(seed).wrong) for seed in (*range(first, first + CHUNK), *EXTRA)]
    assert [each for each in wrong if each[1]] == []


@pytest.mark.parametrize("seeds", [FIRST, pytest.param(SEEDS, marks=pytest.mark.slow)])
def test_every_cell_is_hit_often_enough(seeds: int, record_property: Callable[[str, object], None]) -> None:
    """`python -m tests.chaos.shared_schedules 0 1216` prints the table."""
    found = [ended(seed) for seed in range(seeds)]
    record_property("coverage", report(found))
    wanted = max(1, seeds // len(PAIRS) - 2)
    hits = hits_of(found)
    assert {pair: hits[pair] for pair in PAIRS if hits[pair] < wanted} == {}
    survived = hits_of([each for each in found if each.how == "success"])
    assert all(survived[place, fault] >= wanted for place, fault in PAIRS if fault not in ("hang", "stop"))


def test_every_fault_meets_every_mode() -> None:
    """Each hand-over, each depth, one process, two and three."""
    met = {pair: set[tuple[str, int, int]]() for pair in PAIRS}
    for seed in range(SEEDS):
        config = make_schedule(seed).config
        met[PAIRS[seed % len(PAIRS)]].add((config.hand_over, config.max_staleness, config.trainer.num_workers))
    assert all(modes == set(MODES) for modes in met.values())


def hits_of(found: list[Ended]) -> Counter[tuple[str, str]]:
    """In how many runs each fault took place."""
    return Counter(hit for each in found for hit in set(each.hits))
