"""Mutants: planted faults in processes that sample and train (`placement=shared`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.mutants.mutation import Mutant, nothing, nothing_awaited
from tests.mutants.tickets import HANGS, RECEIVER

RUNS, TURNS = "tests.unit.shared.test_shared_runs", "tests.unit.shared.test_turns"
WORKER, RECOVERY = "tests.unit.shared.test_shared_worker", "tests.unit.shared.test_shared_recovery"


def no_patience(kept: Any) -> Any:
    return lambda turns: 0.0


def as_soon_as_the_ticket(generate_seconds: Any) -> Any:
    """Without the time that a call to train may take which the ticket waits for."""
    return lambda config, tickets: config.deadlines.generate * tickets


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


def whatever_has_arrived(take_over: Any) -> Any:
    return lambda trainer, digest, state: take_over(trainer, state.digest(), state)


def as_if_nobody_was_busy(of: Any) -> Any:
    return lambda owners, samples, now=0.0, *, busy=None: of(owners, samples, now)


def whatever_may_limit_it(may_measure_later: Any) -> Any:
    return lambda config: True


def nobody(busy_ranks: Any) -> Any:
    return lambda ctx, now: {}


def from_the_weights_after_it(measure_after: Any) -> Any:
    return lambda region, rows, before: measure_after(region, rows, region._inputs.parameters.values.data.clone())


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
        "a newcomer takes over a peer's state without comparing its digest",
        {"async_flowrl.shared.worker:SharedTrainer.take_over": whatever_has_arrived},
        f"{WORKER}:test_the_state_of_a_peer_with_another_digest_is_refused",
        raises=("Failed",),
    ),
    Mutant(
        "a group is given to a process in the middle of a long ticket while another is idle",
        {"async_flowrl.controller.owners:Owners.of": as_if_nobody_was_busy},
        f"{RUNS}:test_a_group_goes_to_a_process_that_is_idle_and_not_to_one_in_a_long_ticket",
        arguments={"mode": "stream"},
    ),
    Mutant(
        "a ticket that waits for training which hangs is named first",
        {"async_flowrl.controller.shared:generate_seconds": as_soon_as_the_ticket},
        f"{RUNS}:test_training_that_hangs_ends_the_run_by_name_as_in_a_separate_pool",
        arguments={"mode": "fully async", "workers": 1, "method": "train_last"},
        raises=("AssertionError", "Failed", "WorkerDied"),
    ),
    Mutant(
        "the KL that may limit an optimizer step is measured after it",
        {"async_flowrl.controller.shared:may_measure_later": whatever_may_limit_it},
        f"{RUNS}:test_the_end_of_a_step_waits_for_a_ticket_only_to_limit_its_kl",
        arguments={"mode": "one step off", "limit": 0.1},
    ),
    Mutant(
        "a KL that is measured after its step is in no line of metrics",
        {"async_flowrl.controller.owed_kl:OwedKL.measured": nothing_awaited},
        f"{RUNS}:test_a_kl_that_is_measured_after_its_step_is_that_of_the_step",
        arguments={"mode": "stream", "deaths": 0},
        raises=("KeyError",),
    ),
    Mutant(
        "a KL is measured by the first process, though another one's ticket ends earlier",
        {"async_flowrl.controller.owed_kl:busy_ranks": nobody},
        f"{RUNS}:test_a_kl_is_measured_by_the_process_whose_ticket_ends_first",
    ),
    Mutant(
        "a KL that is measured after its step is that between equal weights",
        {"async_flowrl.training.trust_region:TrustRegion.measure_after": from_the_weights_after_it},
        f"{WORKER}:test_the_end_of_a_step_waits_for_no_ticket_but_a_unit_of_training_does",
        arguments={"measured": "after"},
    ),
    Mutant(
        "a run that is stopped drops the KL of its last step",
        {"async_flowrl.controller.after_step:AfterStep._settle": nothing_awaited},
        f"{RECOVERY}:test_a_run_that_is_stopped_after_a_measured_step_has_the_whole_line_and_goes_on",
        raises=("AssertionError", "KeyError"),
    ),
    Mutant(
        "a process that hangs over the KL of a stopped run is still asked for the weights",
        {"async_flowrl.controller.replica_calls:DeadlineExceeded": lambda error: KeyError},
        f"{RECOVERY}:test_a_measurement_that_hangs_when_a_run_stops_costs_neither_its_weights_nor_an_evaluation",
        arguments={"evaluates": False},
        raises=HANGS,
    ),
)
