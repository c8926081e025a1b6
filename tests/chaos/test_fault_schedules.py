"""Tests of seeded fault schedules: each run ends with the undisturbed weights or with a named error."""

from collections.abc import Iterable

import pytest

from tests.chaos.fault_schedules import HORIZON_SECONDS, PAIRS, coverage, fatal, outcome

pytestmark = pytest.mark.chaos

SEEDS, FIRST = 8 * len(PAIRS), len(PAIRS)
"""Of `make test-slow`, and those of them that `make test` runs: 8 and 1 for each cell of the chaos matrix."""
EXTRA: tuple[int, ...] = (968, len(PAIRS) + PAIRS.index(("rollout:prove", "kill")))
"""Seeds beyond these: one that failed once, and one whose fault the first of its cell misses."""


@pytest.mark.parametrize("seeds", [FIRST, pytest.param(SEEDS, marks=pytest.mark.slow)])
def test_every_schedule_ends_well_or_by_name_and_every_cell_is_hit(seeds: int) -> None:
    """`python -m tests.chaos fault_schedules 0 352` prints the table."""
    ended = [outcome(seed) for seed in sorted({*range(seeds), *EXTRA})]
    assert [(each.seed, each.wrong) for each in ended if each.wrong] == []
    assert all(each.seconds < HORIZON_SECONDS for each in ended)
    assert all(each.hits for each in ended if each.how != "success"), "it failed without a fault"
    min_hits = max(1, seeds // len(PAIRS) - 2)
    hits = coverage(ended)
    assert {pair: hits[pair] for pair in PAIRS if hits[pair] < min_hits} == {}
    survived = coverage([each for each in ended if each.how == "success"])
    assert all(survived[pair] >= min_hits for pair in PAIRS if not fatal(*pair))
    # A call whose argument is lost never begins, so nothing can go wrong inside it.
    began = coverage([each for each in ended if each.how == "success" and not lost(each.hits)])
    assert not any(began[place, fault] for place, fault in PAIRS if fatal(place, fault) and fault != "slow")


def lost(hits: Iterable[tuple[str, str]]) -> bool:
    """Whether a payload was lost."""
    return any(fault in ("lose", "lose-trajectory", "lose-images") for _, fault in hits)
