"""Tests of tickets that share a batch: always the same ones, whichever worker makes them and whatever is lost."""

from typing import Any

import pytest

from async_flowrl.data.sampler import Sampler
from async_flowrl.tickets.table import Shape, TicketTable
from tests.support.toy import ToyRun, toy_config, virtual
from tests.support.toy_pool import Fault, Timing

LENGTHS = 30, 1, 20, 2, 10, 10
"""Lengths of six training prompts, four of which are in a step."""


def shared(
    size: int, fault: Fault | None = None, *, workers: int = 2, timing: Timing | None = None, **more: Any
) -> ToyRun:
    config = toy_config(1, steps=5, ticket_size=2, rollout__tickets_per_batch=size, rollout__num_workers=workers)
    return virtual(config, timing, *([fault] if fault else []), **more)


def uneven(size: int, fault: Fault | None = None, **more: Any) -> ToyRun:
    """The same with prompts of different lengths."""
    return shared(size, fault, texts=["x" * length for length in LENGTHS], **more)


def test_a_batch_is_the_next_tickets_of_a_step() -> None:
    """Eight tickets a step, so three, three and two; never some of two steps."""
    (worker,) = shared(3, workers=1).groups["rollout"].workers
    first = [(0, 1, 2), (3, 4, 5), (6, 7)]
    assert worker.target.batches == [tuple(8 * step + k for k in batch) for step in range(5) for batch in first]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_batches_are_of_prompts_of_about_one_length(size: int) -> None:
    """Whoever makes them: a step's tickets in the order of their prompts' lengths, then by number, cut into batches."""
    found = uneven(size, workers=3, timing=Timing(seed=1, spread=0.9))
    drawn = Sampler(len(LENGTHS), 4, seed=0, shuffle=True)
    expected = []
    for step in range(5):
        tickets = sorted(range(8), key=lambda k: (LENGTHS[drawn.step(step)[k // 2]], k))
        expected += [tuple(8 * step + k for k in tickets[start : start + size]) for start in range(0, 8, size)]
    assert size <= 2 or any(list(batch) != sorted(batch) for batch in expected), "the order of numbers would do"
    made = [batch for worker in found.groups["rollout"].workers for batch in worker.target.batches]
    assert sorted(made) == ([] if size == 1 else sorted(expected))


@pytest.mark.parametrize("what", ["kill", "lose-images"])
def test_batches_by_length_are_made_again_in_the_same_company(what: str) -> None:
    digest = uneven(3, workers=1).digest
    assert digest != uneven(1).digest, "the company of a ticket does not matter, so nothing is tested here"
    assert digest == uneven(3, workers=3, timing=Timing(seed=1, spread=0.9, slow={"rollout-1": 3.0})).digest
    found = uneven(3, lambda *call: what if call == ("rollout-0", "generate", 2) else None)
    assert found.table.retried > 0 and found.digest == digest


@pytest.mark.parametrize("what", ["kill", "hang", "lose-images", "lose-trajectory"])
@pytest.mark.parametrize("number", [1, 4])
def test_what_is_lost_is_made_again_in_the_same_company(what: str, number: int) -> None:
    """A group of two tickets is in two batches of three, or beside half a group: the others are computed, too."""
    found = shared(3, lambda *call: what if call == ("rollout-0", "generate", number) else None)
    assert found.observer.of("injected") and found.table.retried > 0
    assert found.digest == shared(3).digest


def test_a_ticket_that_is_made_again_waits_once() -> None:
    """Tickets 0 to 6 wait; eight would have to wait for a busy worker of two to get one."""
    table = TicketTable(Shape(tickets_per_group=1, groups_per_step=12, total_steps=1, max_staleness=0))
    table.publish(0, "digest")
    for worker in ("rollout-0", "rollout-1"):
        table.join(worker)
        table.acknowledge(worker, 0, "digest")
    for ticket in list(table.live())[6:]:
        table.start(ticket, "rollout-0")
    table.retry(next(ticket for ticket in table.live() if ticket.ordinal == 6))
    assert table.next_for("rollout-0", ahead=True, together=2) is None
    table.retry(next(ticket for ticket in table.live() if ticket.ordinal == 9))
    assert table.next_for("rollout-0", ahead=True, together=2) is not None


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_evaluation_keeps_its_share(size: int) -> None:
    """A pool that is never idle takes every fourth of its turns from it, however many tickets a batch has."""
    config = toy_config(3, steps=8, ticket_size=2, evaluate__every=2, rollout__tickets_per_batch=size)
    config.rollout.num_workers = 1
    found = virtual(config, Timing(generate=size, update=0.1))
    begun, ended = (found.tickets(state, kind="evaluation")[::2] for state in ("PENDING", "TRAINED"))
    assert len(begun) == 4
    for first, last in zip(begun, ended, strict=True):
        others = [e for e in found.tickets("RUNNING") if first["time"] < e["time"] < last["time"]]
        assert len(others) <= 8 * size
