"""Tests of the estimate when a process of `placement=shared` will have made its ticket."""

from contextlib import ExitStack

import pytest

from async_flowrl.controller.owners import Owners
from async_flowrl.controller.ticket_clock import TicketClock


class Process:
    """A TicketClock on a clock that the test sets, and the calls for tickets that are open."""

    def __init__(self) -> None:
        self.clock, self.now = TicketClock(), 0.0
        self._open: list[ExitStack] = []

    def give(self, at: float) -> None:
        self.now = at
        self._open.append(ExitStack())
        self._open[-1].enter_context(self.clock.ticket(lambda: self.now))

    def answer(self, at: float) -> None:
        self.now = at
        self._open.pop(0).close()

    def fail(self, at: float) -> None:
        self.now = at
        opened = self._open.pop(0)
        with pytest.raises(RuntimeError, match="the worker died"), opened:
            raise RuntimeError("the worker died")

    def made_one(self, seconds: float = 11.0) -> "Process":
        """The process with a ticket that took so many seconds, and another begun then."""
        self.give(0.0)
        self.give(0.0)
        self.answer(seconds)
        return self


def test_without_work_a_process_is_free() -> None:
    clock = TicketClock()
    assert not clock.busy and clock.left(5.0) == 0.0


def test_the_first_ticket_takes_twice_what_it_has_taken() -> None:
    process = Process()
    process.give(3.0)
    assert process.clock.busy and process.clock.left(5.0) == 2.0


def test_a_ticket_is_expected_to_take_what_the_last_one_took_and_a_late_one_as_much_again() -> None:
    process = Process().made_one()
    assert [process.clock.left(now) for now in (12.0, 21.0, 22.0, 25.0)] == [10.0, 1.0, 0.0, 3.0]


def test_training_comes_between_two_tickets() -> None:
    process = Process().made_one()
    process.give(11.0)
    process.clock.set_training(has_training=True)
    assert process.clock.left(15.0) == 7.0, "the ticket that was under way before"
    process.answer(22.0)
    assert process.clock.left(22.5) == 0.0 and process.clock.busy, "it trains, and the next ticket waits"
    assert process.clock.trained(15.0, 24.0) == 2.0, "without the wait for the ticket"
    process.clock.set_training(has_training=False)
    assert process.clock.left(25.0) == 10.0
    process.answer(36.0)
    process.give(40.0)
    assert process.clock.left(40.0) == 12.0


def test_a_call_that_waited_for_nothing_counts_in_full() -> None:
    process = Process().made_one()
    process.answer(22.0)
    process.clock.set_training(has_training=True)
    assert process.clock.trained(30.0, 30.0005) == pytest.approx(0.0005)


@pytest.mark.parametrize("first", [True, False])
def test_a_short_call_that_is_answered_before_the_ticket_ahead_of_it(*, first: bool) -> None:
    """The images of the ticket come after the answer of the call: the ticket took 11 s all the same."""
    process = Process() if first else Process().made_one()
    began = 0.0 if first else 11.0
    for _ in range(2 if first else 1):
        process.give(began)
    process.clock.set_training(has_training=True)
    process.clock.trained(began + 5.0, began + 11.2)
    process.clock.set_training(has_training=False)
    process.answer(began + 11.4)
    assert process.clock.left(began + 11.4) == pytest.approx(11.2 - 0.2), "the next began when the call ended"


def test_a_unit_that_a_pause_was_made_for_comes_before_the_ticket_that_was_given() -> None:
    """The process held the ticket back (shared/turns.py), which took 11 s beside 6 s of training."""
    process = Process().made_one()
    process.clock.set_training(has_training=True)
    process.clock.trained(11.1, 17.0)
    process.clock.set_training(has_training=False)
    assert process.clock.left(20.0) == 8.0
    process.answer(28.0)
    process.give(28.0)
    assert process.clock.left(28.0) == 11.0


def test_a_call_that_fails_measures_nothing_and_ends_its_ticket() -> None:
    process = Process().made_one()
    process.give(11.0)
    process.clock.set_training(has_training=True)
    process.fail(14.0)
    assert process.clock.left(15.0) == 0.0, "it trains: no ticket is ahead of that any more"
    assert process.clock.trained(12.0, 16.0) == 2.0
    process.clock.set_training(has_training=False)
    assert process.clock.left(20.0) == 7.0, "of 11 s, since 16"
    process.answer(27.0)
    assert not process.clock.busy


def test_two_answers_in_one_turn_of_the_loop_leave_the_pace_as_it_was() -> None:
    process, owners = Process().made_one(), Owners(2)
    for replica in (0, 1):
        owners.took(replica, 4, 4.0)
    process.clock.set_training(has_training=True)
    process.answer(24.0)
    seconds = process.clock.trained(15.0, 24.0001)
    assert seconds == 0.0
    owners.took(0, 4, seconds, idle_at=24.0)
    owners.begin(4, now=30.0)
    assert [owners.of([4], now=30.0) for _ in range(4)] == [(0,), (1,), (0,), (1,)]
