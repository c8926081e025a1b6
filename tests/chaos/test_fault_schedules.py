"""More than a thousand seeded fault schedules: each ends with the undisturbed weights or with a named error."""

from collections.abc import Callable, Iterable

import pytest

from tests.chaos.fault_schedules import HORIZON, PAIRS, coverage, fatal, outcome, report

pytestmark = pytest.mark.chaos

SEEDS = 1152
"""32 for each cell of the chaos matrix."""
CHUNK = 48
LEAST = 30
EXTRA: tuple[int, ...] = ()
"""Seeds beyond these that failed once: they stay."""


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_every_schedule_ends_well_or_by_name(first: int) -> None:
    ended = [outcome(seed) for seed in (*range(first, first + CHUNK), *EXTRA)]
    assert [(each.seed, each.wrong) for each in ended if each.wrong] == []
    assert all(each.seconds < HORIZON for each in ended)
    assert all(each.hits for each in ended if each.how != "success"), "it failed without a fault"


def test_every_cell_is_hit_often_enough(record_property: Callable[[str, object], None]) -> None:
    """`python -m tests.chaos.fault_schedules 0 1152` prints the table."""
    ended = [outcome(seed) for seed in range(SEEDS)]
    record_property("coverage", report(ended))
    hits = coverage(ended)
    assert {pair: hits[pair] for pair in PAIRS if hits[pair] < LEAST} == {}
    survived = coverage([each for each in ended if each.how == "success"])
    assert all(survived[pair] >= LEAST for pair in PAIRS if not fatal(*pair))
    # A call whose argument is lost never begins, so nothing can go wrong inside it.
    began = coverage([each for each in ended if each.how == "success" and not lost(each.hits)])
    assert not any(began[place, fault] for place, fault in PAIRS if fatal(place, fault) and fault != "slow")


def lost(hits: Iterable[tuple[str, str]]) -> bool:
    """Whether a payload was lost."""
    return any(fault in ("lose", "lose-trajectory", "lose-images") for _, fault in hits)
