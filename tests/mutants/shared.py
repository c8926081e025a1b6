"""Mutants: planted faults in processes that sample and train (`placement=shared`)."""

from typing import Any

from tests.mutants.mutation import Mutant, nothing
from tests.mutants.tickets import RECEIVER

RUNS, TURNS = "tests.unit.shared.test_shared_runs", "tests.unit.shared.test_turns"


def as_soon_as_the_ticket(generate_seconds: Any) -> Any:
    """Without the time that a call to train may take which the ticket waits for."""
    return lambda deadlines, tickets: deadlines.config.deadlines.generate * tickets


SHARED_FAULTS = (
    Mutant(
        "other weights than the first rank's are kept as that version",
        {f"{RECEIVER}._check_digests": nothing},
        f"{RUNS}:test_a_worker_that_has_made_other_weights_ends_the_run_by_name",
        raises=("Failed",),
    ),
    Mutant(
        "a ticket begins between two units of training that follow one another",
        {"async_flowrl.shared.turns:Turns._pause": lambda pause: lambda turns: 0.0},
        f"{TURNS}:test_a_ticket_waits_for_more_to_train_but_not_for_ever",
        arguments={"more": True, "seconds": 0.5},
    ),
    Mutant(
        "a ticket that waits for training which hangs is named first",
        {"async_flowrl.shared.controller:SharedPool.generate_seconds": as_soon_as_the_ticket},
        f"{RUNS}:test_training_that_hangs_ends_the_run_by_name_as_in_a_separate_pool",
        arguments={"mode": "fully async", "workers": 1},
        raises=("AssertionError", "Failed", "WorkerDied"),
    ),
)
