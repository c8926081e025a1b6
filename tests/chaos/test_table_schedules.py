"""Tests of random schedules of the ticket table: no event exceeds the bound, and some reach it."""

import random
from collections import Counter

import pytest

from async_flowrl.tickets.table import Shape, TicketTable
from tests.chaos.table_schedules import TableSchedule

pytestmark = pytest.mark.chaos

FIRST, MORE = range(1_000), range(1_000, 10_000)
"""Schedules of `make test`, and those that `make test-slow` runs besides."""


def run(seed: int) -> TableSchedule:
    rng = random.Random(f"shape {seed}")
    shape = Shape(rng.choice([1, 1, 2]), rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 4]), rng.choice([0, 1, 2, 3]))
    schedule = TableSchedule(TicketTable(shape), seed, workers=rng.choice([1, 2, 3]))
    schedule.run()
    return schedule


@pytest.mark.parametrize("seeds", [FIRST, pytest.param(MORE, marks=pytest.mark.slow)], ids=len)
def test_no_schedule_breaks_the_bound_or_loses_a_ticket(seeds: range) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        schedule = run(seed)
        counts += schedule.counts
        shape = schedule.table.shape
        limit = (min(shape.max_staleness + 1, shape.total_steps)) * shape.tickets_per_step
        counts["outstanding at its limit"] += schedule.max_outstanding == limit
        counts["oldest sample at its limit"] += max(schedule.ages) == min(shape.max_staleness, shape.total_steps - 1)
    assert counts["oldest sample at its limit"] == len(seeds)
    disturbances = {name: counts[name] for name in ("deaths with work", "losses", "duplicate", "late")}
    assert all(count > len(seeds) / 10 for count in disturbances.values()), f"too few: {disturbances}"
    assert counts["outstanding at its limit"] > len(seeds) / 3
