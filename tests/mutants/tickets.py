"""Mutants: planted faults in the issue of tickets, in the choice of their weights, and in the order of training."""

from dataclasses import replace
from typing import Any

from async_flowrl.tickets.table import FINAL, TRAIN, State
from tests.mutants.mutation import Fault, Mutant, before
from tests.support.float_sum import FloatSum

TICKETS = "async_flowrl.tickets.table"
PENDING = "async_flowrl.tickets.table:PendingTickets.first"
DISPATCH, TRAINER = "async_flowrl.controller.dispatch", "async_flowrl.controller.trainer"
HANDED = "async_flowrl.controller.training_groups"
RECEIVER = "checkpoint_engine.receiver:Receiver"
LOOP, HAND_OVER = "tests.unit.test_loop", "tests.unit.test_optimizer_steps"
FAULTS, TABLE = "tests.unit.test_faults", "tests.unit.test_tickets"
STALE = {"mode": "one_step_off"}
HANGS = ("Deadlock", "HorizonReached", "Stalled")


def one_more_version(shape: Any) -> Any:
    return lambda config: replace(shape(config), max_staleness=config.max_staleness + 1)


def capacity_changed(by: int) -> Fault:
    return lambda init: lambda *args, capacity, **scaling: init(*args, capacity=max(1, capacity + by), **scaling)


def acknowledged_by_everybody(acknowledge: Any) -> Any:
    def fault(table: Any, worker: str, *version: Any, **slot: bool) -> None:
        for each in table.held:
            acknowledge(table, each, *version, **slot)

    return fault


def whatever_is_held(kind: str) -> Fault:
    """As if a worker held every version."""
    return lambda first: lambda pending, of, versions: first(pending, of, range(99) if of == kind else versions)


GATE = (
    Mutant(
        "gate off by one: the door refuses",
        {f"{TICKETS}:Shape.version_for": lambda version_for: lambda shape, step: max(0, version_for(shape, step) - 1)},
        f"{LOOP}:test_staleness_is_exactly_the_smaller_of_step_and_k",
        arguments=STALE,
        raises=("Refused",),
    ),
    Mutant(
        "gate off by one, and nobody at the door: the table and the workers' rings are made for one version more",
        {"async_flowrl.run.recovery:shape": one_more_version, f"{RECEIVER}.__init__": capacity_changed(+1)},
        f"{LOOP}:test_staleness_is_exactly_the_smaller_of_step_and_k",
        arguments=STALE,
    ),
    Mutant(
        "samples are a version too fresh",
        {f"{TICKETS}:Shape.version_for": lambda old: lambda shape, step: min(step, old(shape, step) + 1)},
        f"{LOOP}:test_staleness_is_exactly_the_smaller_of_step_and_k",
        arguments=STALE,
    ),
    Mutant(
        "first acknowledgement publishes to everybody",
        {f"{TICKETS}:TicketTable.acknowledge": acknowledged_by_everybody},
        f"{LOOP}:test_every_version_is_acknowledged_by_everybody_before_it_is_served",
        raises=("AssertionError", "WorkerFailed"),
    ),
    Mutant(
        "the worker keeps a ring of K",
        {f"{RECEIVER}.__init__": capacity_changed(-1)},
        f"{LOOP}:test_staleness_does_not_depend_on_timing",
        arguments=STALE,
        raises=("WorkerFailed",),
    ),
    Mutant(
        "tickets are issued a step ahead of their weights' publication and start without them",
        {PENDING: whatever_is_held(TRAIN)},
        f"{LOOP}:test_the_weights_do_not_depend_on_workers_or_delays",
        arguments={"mode": "sync", "workers": 4},
        raises=("Refused",),
    ),
)


def trained_twice(give: Any) -> Any:
    return lambda trainer, ctx, tasks, sums, groups, method, **options: give(
        trainer, ctx, tasks, sums, [*groups, *groups], method, **options
    )


def whole_step_or_nothing(ready: Any) -> Any:
    def fault(table: Any, step: int) -> list[int]:
        groups = ready(table, step)
        of_step = {ticket.group for ticket in table.live() if (ticket.kind, ticket.step) == (TRAIN, step)}
        return list(groups) if of_step <= set(groups) else []

    return fault


def call_running(table: Any, ticket: Any, **result: Any) -> None:
    if ticket.state not in FINAL:
        ticket.state = State.RUNNING


def call_scored(table: Any, step: int) -> None:
    for ticket in table.live():
        ticket.scores = ticket.scores or ()


ORDER = (
    Mutant(
        "groups of a stream wait for the last of their step",
        {f"{TICKETS}:TicketTable.ready_groups": whole_step_or_nothing},
        f"{HAND_OVER}:test_streaming_trains_a_group_while_others_of_its_step_are_made",
        arguments={"workers": 1},
    ),
    Mutant(
        "gradients are added as floats",
        {"tests.support.toy_trainer:ToyTrainer.sum_of_gradients": lambda exact: FloatSum},
        f"{HAND_OVER}:test_groups_are_trained_in_whatever_order_they_get_ready",
        arguments={"k": 1},
    ),
    Mutant(
        "a group is trained twice",
        {f"{TRAINER}:TrainerGroup._give": trained_twice},
        f"{LOOP}:test_every_group_is_trained_once_in_its_own_step",
        arguments={"mode": "stream"},
        raises=("NotThePlan",),
    ),
    Mutant(
        "a late duplicate counts again",
        {f"{TICKETS}:TicketTable.generated": before(call_running)},
        f"{TABLE}:test_a_dead_workers_ticket_runs_again_and_a_late_result_counts_once",
    ),
    Mutant(
        "rewards go to the wrong images of a group",
        {"async_flowrl.controller.scoring:score_once": lambda score: lambda *call: score(*call[:-1], call[-1][::-1])},
        "tests.unit.test_plain_loop:test_the_controller_trains_exactly_what_a_plain_loop_trains",
        arguments={"k": 1},
    ),
    Mutant(
        "rewards go to the wrong groups",
        {f"{HANDED}:group_advantages": lambda advantages: lambda *call: advantages(*call)[::-1]},
        f"{HAND_OVER}:test_batch_and_stream_make_the_same_weights",
        arguments={"k": 1},
    ),
    Mutant(
        "a group without scores counts as trained",
        {f"{TICKETS}:TicketTable.close_step": before(call_scored)},
        f"{TABLE}:test_groups_without_scores_are_skipped_and_counted",
    ),
)


def digest_taken_from(published: str) -> Fault:
    """The table takes every result for one made with the weights that it knows."""

    def wrapped(generated: Any) -> Any:
        def fault(table: Any, ticket: Any, *, version: int, digest: str, payload: Any) -> bool:
            known = getattr(table, published).get(version, digest)
            return bool(generated(table, ticket, version=version, digest=known, payload=payload))

        return fault

    return wrapped


def take_for_known(table: Any, step: int, group: int) -> None:
    for ticket in table.group(step, group):
        ticket.digest = table.published.get(ticket.version)


def take_for_fresh(table: Any, step: int, group: int) -> None:
    for ticket in table.group(step, group):
        ticket.version = table.shape.version_for(step)


DOORS = (
    Mutant(
        "a result of an earlier attempt is accepted",
        {f"{TICKETS}:TicketTable.generated": digest_taken_from("published")},
        f"{TABLE}:test_a_result_made_with_other_weights_is_refused",
        raises=("Failed",),
    ),
    Mutant(
        "nobody compares what an evaluation was made with",
        {f"{TICKETS}:TicketTable.generated": digest_taken_from("evaluated")},
        f"{TABLE}:test_an_evaluation_made_with_other_weights_is_refused",
        raises=("Failed",),
    ),
    Mutant(
        "nobody asks at the trainer's door what a ticket was made with",
        {f"{TICKETS}:TicketTable.hand_over": before(take_for_known)},
        f"{TABLE}:test_a_ready_ticket_made_with_other_weights_does_not_pass_the_trainers_door",
        arguments={"published": "of another life"},
        raises=("Failed",),
    ),
    Mutant(
        "nobody asks at the trainer's door how old a ticket is",
        {f"{TICKETS}:TicketTable.hand_over": before(take_for_fresh)},
        f"{TABLE}:test_a_ready_ticket_of_another_version_does_not_pass_the_trainers_door",
        raises=("Failed",),
    ),
)

TICKET_FAULTS = (*GATE, *ORDER, *DOORS)
