"""Hundreds of runs whose trainers, controllers and checkpoints die: each goes on as if nothing had been."""

from collections import Counter
from collections.abc import Callable

import pytest

from tests.chaos.life_schedules import PAIRS, fatal, outcome, report

pytestmark = pytest.mark.chaos

SEEDS = 32 * len(PAIRS)
CHUNK = 32
LEAST = 30
EXTRA: tuple[int, ...] = ()
"""Seeds beyond these that failed once: they stay."""


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_every_run_goes_on_or_ends_by_name(first: int) -> None:
    ended = [outcome(seed) for seed in (*range(first, first + CHUNK), *EXTRA)]
    assert [(each.seed, each.wrong) for each in ended if each.wrong] == []


def test_every_cell_is_hit_often_enough(record_property: Callable[[str, object], None]) -> None:
    """`python -m tests.chaos.life_schedules 0 640` prints the table."""
    ended = [outcome(seed) for seed in range(SEEDS)]
    record_property("coverage", report(ended))
    hits = Counter(hit for each in ended for hit in set(each.hits))
    assert {pair: hits[pair] for pair in PAIRS if hits[pair] < LEAST} == {}
    survived = Counter(hit for each in ended if each.how == "success" for hit in set(each.hits))
    assert all((survived[pair] == 0) if fatal(*pair) else (survived[pair] >= LEAST) for pair in PAIRS)
