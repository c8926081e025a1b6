"""Mutants: planted faults in processes that sample and train (`placement=shared`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.mutants.mutation import Mutant, nothing
from tests.mutants.tickets import RECEIVER

RUNS, TURNS = "tests.unit.shared.test_shared_runs", "tests.unit.shared.test_turns"
WORKER, RECOVERY = "tests.unit.shared.test_shared_worker", "tests.unit.shared.test_shared_recovery"


def no_patience(kept: Any) -> Any:
    return lambda turns: 0.0


def as_soon_as_the_ticket(generate_seconds: Any) -> Any:
    """Without the time that a call to train may take which the ticket waits for."""
    return lambda deadlines, tickets: deadlines.config.deadlines.generate * tickets


def whenever_the_device_is_free(sampling: Any) -> Any:
    """A ticket does not wait for training that waits."""

    @contextmanager
    def eager(turns: Any) -> Iterator[None]:
        with turns._changed:
            turns.queued = getattr(turns, "queued", 0) + 1
            turns._changed.wait_for(lambda: not turns._taken)
            turns.queued, turns._taken = turns.queued - 1, True
        try:
            yield
        finally:
            with turns._changed:
                turns._taken = False
                turns._changed.notify_all()

    return eager


def behind_all_tickets(training: Any) -> Any:
    """Training waits until no ticket waits for the device."""

    @contextmanager
    def last(turns: Any, *, more: bool = False) -> Iterator[None]:
        with turns._changed:
            turns._changed.wait_for(lambda: not turns._taken and not turns.queued)
        with training(turns, more=more):
            yield

    return last


SHARED_FAULTS = (
    Mutant(
        "other weights than the first rank's are kept as that version",
        {f"{RECEIVER}._check_digests": nothing},
        f"{RUNS}:test_a_worker_that_has_made_other_weights_ends_the_run_by_name",
        raises=("Failed",),
    ),
    Mutant(
        "a ticket begins between two units of training that follow one another",
        {"async_flowrl.shared.turns:Turns._pause": no_patience},
        f"{TURNS}:test_a_ticket_waits_for_more_to_train_but_not_for_ever",
        arguments={"more": True, "seconds": 0.5},
    ),
    Mutant(
        "tickets that were given ahead come before training that waits",
        {
            "async_flowrl.shared.turns:Turns.sampling": whenever_the_device_is_free,
            "async_flowrl.shared.turns:Turns.training": behind_all_tickets,
        },
        f"{TURNS}:test_training_comes_before_a_ticket_that_was_given_ahead",
    ),
    Mutant(
        "a ticket that waits for training which hangs is named first",
        {"async_flowrl.shared.controller:SharedDeadlines.generate": as_soon_as_the_ticket},
        f"{RUNS}:test_training_that_hangs_ends_the_run_by_name_as_in_a_separate_pool",
        arguments={"mode": "fully async", "workers": 1, "method": "train_last"},
        raises=("AssertionError", "Failed", "WorkerDied"),
    ),
)
