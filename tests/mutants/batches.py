"""Mutants: planted faults in evaluations beside training, and in the company in which a batch of tickets is made."""

from typing import Any

from async_flowrl.tickets.table import EVALUATION, TRAIN, State
from tests.mutants.mutation import Mutant, after
from tests.mutants.tickets import DISPATCH, HANGS, PENDING, TICKETS, whatever_is_held

BATCHES, BESIDE_TRAINING = "tests.unit.test_batches", "tests.unit.test_evaluations_beside_training"


def labelled_newest(issue: Any) -> Any:
    return lambda table, *, version, **options: issue(table, version=max(table.published), **options)


def weights_kept(activate: Any) -> Any:
    def fault(worker: Any, request: Any) -> tuple[str, int]:
        if request.kind == EVALUATION or worker.receiver.active is None:
            digest, swaps = activate(worker, request)
            return str(digest), int(swaps)
        return str(worker.receiver.active.digest), 0

    return fault


EVALUATION_FAULTS = (
    Mutant(
        "an evaluation's weights stay for training",
        {"async_flowrl.rollout.rollout_worker:RolloutWorker._activate": weights_kept},
        "tests.unit.rollout.test_worker:test_evaluation_has_its_own_slot_and_leaves_nothing_behind",
    ),
    Mutant(
        "an evaluation starts before its weights are there",
        {PENDING: whatever_is_held(EVALUATION)},
        f"{BESIDE_TRAINING}:test_evaluation_changes_nothing_and_sees_its_own_version_only",
        arguments={"mode": "fully_async"},
        raises=("Refused",),
    ),
    Mutant(
        "an evaluation is labelled with the newest version",
        {f"{TICKETS}:TicketTable.issue_evaluation": labelled_newest},
        f"{BESIDE_TRAINING}:test_a_second_evaluation_waits_for_the_first_and_loses_nothing",
        raises=(*HANGS, "AssertionError"),
    ),
    Mutant(
        "an evaluation is a barrier",
        {"async_flowrl.controller.evaluation:Evaluations.start": after(lambda evaluations, *args: evaluations.drain())},
        f"{BESIDE_TRAINING}:test_evaluation_is_no_barrier",
    ),
)


def only_wanted(batch_of: Any) -> Any:
    return lambda *batch: [ticket for ticket in batch_of(*batch) if ticket.state is State.PENDING]


def whatever_waits(batch_of: Any) -> Any:
    def fault(table: Any, ticket: Any, size: int, order: Any) -> list[Any]:
        waiting = [t for t in table.live() if t.state is State.PENDING and (t.kind, t.step) == (TRAIN, ticket.step)]
        return waiting[:size]

    return fault


def of_first_part(group_sums: Any) -> Any:
    def fault(passes: Any, group: Any, part: Any, measured: Any) -> list[list[float]]:
        sums = group_sums(passes, group, part, measured)
        return [[0.0 if part.part else value for value in level] for level in sums]

    return fault


BATCH_FAULTS = (
    Mutant(
        "a ticket that is made again has not the company that it had",
        {f"{DISPATCH}:batch_of": only_wanted},
        f"{BATCHES}:test_what_is_lost_is_made_again_in_the_same_company",
        arguments={"what": "lose-images", "number": 1},
    ),
    Mutant(
        "a batch is of whatever tickets wait",
        {f"{DISPATCH}:batch_of": whatever_waits},
        f"{BATCHES}:test_batches_are_of_prompts_of_about_one_length",
        arguments={"size": 3},
    ),
    Mutant(
        "a loss of whole groups sees the first part alone",
        {"async_flowrl.training.forward_passes:ForwardPasses.group_sums": of_first_part},
        "tests.unit.training.test_trainer_groups:test_a_group_that_is_cut_has_the_gradient_of_the_whole_group",
        arguments={"name": "dgpo"},
    ),
)
