"""Tests of random schedules of the ticket table: no event exceeds the bound, and some reach it."""

import random
from collections import Counter

import pytest

from async_flowrl.tickets.table import Shape, State, Ticket, TicketTable

RUNNING = (State.RUNNING, State.SCORING, State.READY, State.HANDED)
MAX_EVENTS = 50_000


def digest(version: int) -> str:
    return f"digest-{version}"


class TableSchedule:
    """One run of a trainer, some workers and a network, drawn from a seed, one event at a time.

    Every worker has its own speed and hears of versions late, in order; one prompt class in four takes four times as
    long; every result may come twice, also after its ticket was given to somebody else.
    """

    def __init__(self, table: TicketTable, seed: int, *, workers: int = 3) -> None:
        self.table, self.rng = table, random.Random(seed)
        self.names = [f"w{index}" for index in range(workers)]
        self.speed = {name: self.rng.choice([1.0, 0.6, 0.2]) for name in self.names}
        self.calm = self.rng.random() < 0.2
        """No deaths and no losses."""
        self.acked = dict.fromkeys(self.names, -1)
        self.latest = 0
        self.under_way: list[tuple[str, Ticket, int]] = []
        self.ages: list[int] = []
        self.trained: list[int] = []
        self.counts: Counter[str] = Counter()
        self.max_outstanding = 0
        for name in self.names:
            table.join(name)
        table.publish(0, digest(0))

    def run(self) -> None:
        shape = self.table.shape
        for _ in range(MAX_EVENTS):
            if self.table.step == shape.total_steps:
                break
            self.event()
            self.check()
        assert self.trained == list(range(shape.total_steps * shape.tickets_per_step))
        assert self.ages == [min(k // shape.tickets_per_step, shape.max_staleness) for k in self.trained]

    def check(self) -> None:
        """Conservation and the bound on outstanding work, at every event."""
        table, shape = self.table, self.table.shape
        counts = table.counts()
        assert sum(counts.values()) == table.issued
        outstanding = sum(counts[state] for state in RUNNING)
        assert outstanding <= (shape.max_staleness + 1) * shape.tickets_per_step
        self.max_outstanding = max(self.max_outstanding, outstanding)

    def event(self) -> None:
        name = self.rng.choice(self.names)
        actions = [self.acknowledge, self.start, self.start, self.arrive, self.arrive, self.train]
        if not self.calm:
            actions += [self.die, self.lose]
        self.rng.choice(actions)(name)

    def acknowledge(self, name: str) -> None:
        if self.acked[name] < self.latest and self.rng.random() < self.speed[name] + 0.2:
            self.acked[name] += 1
            self.table.acknowledge(name, self.acked[name], digest(self.acked[name]))

    def start(self, name: str) -> None:
        if any(worker == name for worker, _, _ in self.under_way):
            return
        ticket = self.table.next_for(name)
        if ticket is not None:
            assert ticket.version <= self.acked[name], "begun without its weights"
            self.table.start(ticket, name)
            self.under_way.append((name, ticket, ticket.attempt))

    def arrive(self, name: str) -> None:
        """A result comes; it may come again later, and it may come from a worker that is dead by now."""
        if not self.under_way:
            return
        index = self.rng.randrange(len(self.under_way))
        worker, ticket, attempt = self.under_way[index]
        slow = 4.0 if ticket.group % 4 == 0 else 1.0
        if self.rng.random() > self.speed[worker] / slow:
            return
        if self.rng.random() < 0.9:
            self.under_way.pop(index)
        before = ticket.state
        first = self.table.generated(ticket, version=ticket.version, digest=digest(ticket.version), payload=attempt)
        assert first == (before in (State.PENDING, State.RUNNING))
        self.counts["duplicate"] += not first
        self.counts["late"] += first and (before is State.PENDING or attempt != ticket.attempt)
        if first and (group := self.table.to_score(ticket)):
            self.table.scored(group, (0.0,))

    def die(self, name: str) -> None:
        """The worker is gone; what it had sent before may still arrive. Its replacement gets what live tickets name."""
        if self.rng.random() < 0.08:
            self.counts["deaths"] += 1
            self.counts["deaths with work"] += bool(self.table.lost_worker(name))
            self.table.join(name)
            self.acked[name] = self.table.shape.version_for(self.table.step) - 1
            self.under_way = [each for each in self.under_way if each[0] != name or self.rng.random() < 0.5]

    def lose(self, name: str) -> None:
        """The images of a ticket are lost, and perhaps those of others of its group."""
        lossable = [ticket for ticket in self.table.live() if ticket.state in (State.READY, State.SCORING)]
        if lossable and self.rng.random() < 0.1:
            self.counts["losses"] += 1
            lost = self.rng.choice(lossable)
            for ticket in self.table.group(lost.step, lost.group):
                if ticket is lost or (ticket.state in (State.READY, State.SCORING) and self.rng.random() < 0.5):
                    self.table.retry(ticket)

    def train(self, name: str) -> None:
        table, step = self.table, self.table.step
        groups = range(table.shape.groups_per_step)
        if step == table.shape.total_steps or not all(table.ready(step, group) for group in groups):
            return
        if self.rng.random() < 0.3:
            return
        for group in groups:
            for ticket in table.hand_over(step, group):
                self.ages.append(step - ticket.version)
                self.trained.append(ticket.ordinal)
        table.close_step(step)
        self.latest = step + 1
        table.publish(self.latest, digest(self.latest))


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
