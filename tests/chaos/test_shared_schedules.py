"""Tests of fault schedules with `placement=shared`: each run ends in the undisturbed weights or with a named error."""

from collections import Counter
from collections.abc import Sequence

import pytest

from tests.chaos.fault_schedules import Ended
from tests.chaos.shared_schedules import MODES, PAIRS, PER_CELL, outcome

pytestmark = pytest.mark.chaos

SEEDS = range(PER_CELL * len(PAIRS))
ONE_EACH = [cell + len(PAIRS) * ((cell + 3) % len(MODES)) for cell in range(len(PAIRS))]
"""Of `make test-slow`, and those of them that `make test` runs: one that hits each cell, in various modes."""


@pytest.mark.parametrize(
    "seeds",
    [ONE_EACH, pytest.param(SEEDS, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
    ids=["one of each", "all of each"],
)
def test_every_run_goes_on_or_ends_by_name_and_every_cell_is_hit(seeds: Sequence[int]) -> None:
    """`python -m tests.chaos shared_schedules 0 912` prints the table."""
    ended = [outcome(seed) for seed in seeds]
    assert [(each.seed, each.wrong) for each in ended if each.wrong] == []
    wanted = max(1, len(seeds) // len(PAIRS) * 3 // 4)
    hits = hits_of(ended)
    assert {pair: hits[pair] for pair in PAIRS if hits[pair] < wanted} == {}
    survived = hits_of([each for each in ended if each.how == "success"])
    assert all(survived[place, fault] >= wanted for place, fault in PAIRS if fault not in ("hang", "stop"))


def hits_of(ended: list[Ended]) -> Counter[tuple[str, str]]:
    """In how many runs each fault took place."""
    return Counter(hit for each in ended for hit in set(each.hits))
