"""Tests of the turns in a process that samples and trains."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from async_flowrl.shared.turns import Turns, patience
from tests.support.until import until

LIMIT = 60.0


class Unit(threading.Thread):
    """A unit of work that stays in its turn until it is told to end."""

    def __init__(self, turn: Callable[[], AbstractContextManager[None]], done: list[str], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.turn, self.done_list = turn, done
        self.inside, self.may_end = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with self.turn():
            self.inside.set()
            if self.may_end.wait(LIMIT):
                self.done_list.append(self.name)

    def end(self) -> None:
        assert self.inside.wait(LIMIT)
        self.may_end.set()
        self.join(LIMIT)
        assert not self.is_alive()


def test_training_comes_before_a_ticket_that_was_given_ahead() -> None:
    turns, done = Turns(), list[str]()
    under_way = Unit(turns.sampling, done, "ticket")
    assert under_way.inside.wait(LIMIT)
    ahead = Unit(turns.sampling, done, "ticket ahead")
    training = Unit(turns.training, done, "training")
    until(lambda: len(vars(turns.changed)["_waiters"]) == 2)
    assert not training.inside.is_set(), "no ticket is interrupted"
    under_way.end()
    until(lambda: training.inside.is_set() or ahead.inside.is_set())
    assert not ahead.inside.is_set(), "the training waits for a ticket that was given ahead"
    training.end()
    ahead.end()
    assert done == ["ticket", "training", "ticket ahead"]


@pytest.mark.parametrize("seconds", [0.5, 60.0])
@pytest.mark.parametrize("more", [True, False])
def test_a_ticket_waits_for_more_to_train_but_not_for_ever(more: bool, seconds: float) -> None:
    now = [100.0]
    turns, done = Turns(clock=lambda: now[0]), list[str]()
    first = Unit(lambda: turns.training(more=more), done, "first")
    assert first.inside.wait(LIMIT)
    now[0] += seconds
    first.end()
    ticket = Unit(turns.sampling, done, "ticket")
    assert ticket.inside.wait(LIMIT if not more else 0.1) is not more
    if more:
        now[0] += patience(seconds) - 0.01
        assert not ticket.inside.wait(0.1)
        now[0] += 0.02  # what was to follow never came
    ticket.end()
    Unit(turns.training, done, "second").end()
    assert done == ["first", "ticket", "second"]


def test_a_ticket_is_at_work_from_its_turn_on() -> None:
    now = [100.0]
    turns, done = Turns(clock=lambda: now[0]), list[str]()
    training = Unit(turns.training, done, "training")
    assert training.inside.wait(LIMIT)
    ticket = Unit(turns.sampling, done, "ticket")
    now[0] += 50.0
    assert turns.sampled_for() == 0.0, "it waits for the training"
    training.end()
    assert ticket.inside.wait(LIMIT)
    now[0] += 7.0
    assert turns.sampled_for() == 7.0
    ticket.end()
    assert turns.sampled_for() == 0.0
