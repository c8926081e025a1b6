"""Mutants: planted faults in the replacement of workers and in the change from one attempt of a run to the next."""

import asyncio
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

from async_flowrl.training.checkpoint import written
from tests.mutants.mutation import Fault, Mutant, after, no_limit, nothing, nothing_awaited
from tests.mutants.tickets import DISPATCH, FAULTS, HANDED, HANGS, TICKETS

LOST = f"{FAULTS}:test_a_worker_lost_while_it_makes_images_is_replaced"
RUN_RECOVERY, CHECKPOINTS = "async_flowrl.run.recovery", "async_flowrl.controller.checkpoints"
RESUME = "async_flowrl.controller.resume"
LIMITS = "async_flowrl.config.schema:LimitsConfig"
RECOVERY, SAVED = "tests.unit.test_recovery", "tests.unit.test_checkpoints"
REWARDS, KEPT = "tests.unit.test_reward_faults", "tests.unit.training.test_kept_state"


def forgotten(lost_worker: Any) -> Any:
    def fault(table: Any, worker: str) -> list[Any]:
        table.held.pop(worker, None)
        return []

    return fault


def not_killed(worker_of: Callable[..., Any]) -> Fault:
    """The worker that `worker_of` finds among the coroutine function's arguments stays alive."""

    def wrapped(original: Any) -> Any:
        async def fault(*args: Any, **options: Any) -> Any:
            with mock.patch.object(worker_of(*args), "kill"):
                return await original(*args, **options)

        return fault

    return wrapped


def never_seen(death_of: Any) -> Any:
    async def fault(ctx: Any, worker: Any) -> None:
        await asyncio.Event().wait()

    return fault


WORKER_FAULTS = (
    Mutant(
        "a dead worker's ticket is never given out again",
        {f"{TICKETS}:TicketTable.lost_worker": forgotten},
        LOST,
        arguments={"what": "kill", "k": 1},
        raises=HANGS,
    ),
    Mutant(
        "a hung worker is not killed",
        {f"{DISPATCH}:replace_rollout": not_killed(lambda ctx, index, death: ctx.rollout.workers[index])},
        LOST,
        arguments={"what": "hang", "k": 1},
    ),
    Mutant(
        "nobody notices that a worker hangs",
        {"async_flowrl.controller.deadlines:deadline": lambda deadline: lambda seconds, what: deadline(math.inf, what)},
        LOST,
        arguments={"what": "hang", "k": 1},
        raises=HANGS,
    ),
    Mutant(
        "nobody notices that a waiting worker dies",
        {f"{DISPATCH}:death_of": never_seen},
        f"{FAULTS}:test_a_worker_that_dies_while_it_waits_is_replaced_at_once",
    ),
    Mutant(
        "a lost payload is not made again",
        {f"{HANDED}:make_again": nothing},
        "tests.unit.test_faults:test_a_lost_payload_is_made_again",
        arguments={"what": "lose-trajectory", "state": "HANDED", "k": 1, "hand_over": "batch"},
        raises=HANGS,
    ),
    Mutant(
        "a worker that dies over and over is replaced for ever",
        {f"{LIMITS}.workers_lost_in_a_row": no_limit},
        f"{FAULTS}:test_a_slot_that_loses_every_worker_ends_the_run_by_name",
        arguments={"method": "load", "what": "kill", "losses": 4},
        raises=(*HANGS, "AssertionError", "OverflowError"),
    ),
    Mutant(
        "a ticket that kills its workers is tried for ever",
        {f"{LIMITS}.ticket_attempts": no_limit},
        f"{FAULTS}:test_a_ticket_that_kills_every_worker_ends_the_run_by_name",
        arguments={"attempts": 6},
        raises=(*HANGS, "DeadlineExceeded"),
    ),
    Mutant(
        "NaN is a reward",
        {"tests.support.toy_reward:toy_scores": lambda checked: lambda name, prompt, result, count: tuple(result)},
        f"{REWARDS}:test_a_reward_that_fails_once_is_asked_again",
        arguments={"what": "nan"},
        raises=("ValueError",),
    ),
)


async def count_as_saved(checkpoints: Any, version: int, *rest: Any) -> None:
    if version not in checkpoints.saved:
        checkpoints.saved.append(version)


def but_rollbacks(event: Any) -> Any:
    return lambda log, what, **fields: None if what == "rollback" else event(log, what, **fields)


def only_before_training(unevaluated: Any) -> Any:
    return lambda steps, ctx: unevaluated(steps, ctx) if ctx.table.step == 0 else []


ATTEMPT_FAULTS = (
    Mutant(
        "metrics are not cut back when a trainer has died",
        {"async_flowrl.observability.metrics:MetricsLog.truncate": nothing},
        f"{RECOVERY}:test_a_dead_trainer_goes_on_from_the_last_kept_state",
        arguments={"method": "kept_state_3"},
    ),
    Mutant(
        "a return to a checkpoint is not recorded",
        {"async_flowrl.observability.events:EventLog.event": but_rollbacks},
        f"{SAVED}:test_a_checkpoint_damaged_while_the_run_goes_on_is_passed_over",
    ),
    Mutant(
        "a worker without a model goes on into the next attempt",
        {f"{RUN_RECOVERY}:clean_rollout": not_killed(lambda worker: worker)},
        f"{RECOVERY}:test_a_rollout_worker_that_cannot_forget_is_replaced",
        arguments={"what": "unloaded"},
        raises=("WorkerFailed",),
    ),
    Mutant(
        "a damaged checkpoint is taken",
        {f"{RESUME}:find_checkpoint": lambda find: lambda directory, **_: next(iter(written(directory)), None)},
        f"{SAVED}:test_a_checkpoint_damaged_while_the_run_goes_on_is_passed_over",
        raises=("DamagedCheckpoint", "WorkerFailed"),
    ),
    Mutant(
        "checkpoints of a history that has ended stay",
        {f"{RUN_RECOVERY}:drop_newer": nothing},
        f"{RECOVERY}:test_an_older_checkpoint_on_purpose",
    ),
    Mutant(
        "a checkpoint that could not be written counts as saved",
        {f"{CHECKPOINTS}:Checkpoints._write": after(count_as_saved)},
        f"{SAVED}:test_the_last_checkpoint_is_insisted_on",
        arguments={"misses": 1},
        raises=("FileNotFoundError",),
    ),
    Mutant(
        "missed checkpoints are never an error",
        {f"{LIMITS}.missed_checkpoints": no_limit},
        f"{SAVED}:test_a_disk_that_stays_full_ends_the_run_by_name",
        arguments={"missed": 3},
        raises=("Failed",),
    ),
    Mutant(
        "the last checkpoint may be missing",
        {f"{CHECKPOINTS}:Checkpoints.insist": lambda insist: lambda checkpoints, *args: checkpoints.save(*args)},
        f"{SAVED}:test_the_last_checkpoint_is_insisted_on",
        arguments={"misses": 2},
        raises=("FileNotFoundError",),
    ),
    Mutant(
        "a resume asks an optional term again that had failed",
        {f"{RUN_RECOVERY}:keeps_scores": lambda keeps: lambda config: False},
        "tests.unit.test_optional_terms:test_a_resume_trains_a_group_without_the_term_that_it_lacked",
        arguments={"combine": "sum"},
    ),
    Mutant(
        "a term that a group lacks counts as 0 for it",
        {"async_flowrl.controller.training_groups:_there": lambda there: lambda scores, name: list(range(len(scores)))},
        "tests.unit.test_optional_terms:test_a_group_has_no_part_in_the_statistics_of_a_term_that_it_lacks",
        arguments={"permute": False},
    ),
    Mutant(
        "a reward that is not deterministic is asked again after a resume",
        {"async_flowrl.controller.score_log:ScoreLog.__contains__": lambda contains: lambda log, group: False},
        "tests.unit.test_recovery:test_groups_are_not_scored_a_second_time_if_that_would_change_their_scores",
        arguments={"killed": "controller"},
    ),
    Mutant(
        "a state is taken over whatever has arrived",
        {"async_flowrl.training.checkpoint:PackedState.digest": lambda digest: lambda state: "the same"},
        f"{KEPT}:test_a_state_with_another_digest_is_refused_and_nothing_of_it_taken",
        raises=("Failed",),
    ),
    Mutant(
        "an optimizer step does not wait for the copy of the state before it",
        {"async_flowrl.training.snapshots:Snapshots.wait": lambda wait: lambda snapshots: ()},
        f"{KEPT}:test_the_next_optimizer_step_waits_for_the_copy_and_its_gradients_do_not",
        raises=("AssertionError", "IndexError"),
    ),
    Mutant(
        "weights that an evaluation still asks for are in no state",
        {"async_flowrl.controller.endpoints:TrainerEndpoint._keep": nothing_awaited},
        f"{RECOVERY}:test_an_evaluation_whose_version_is_old_when_a_rank_dies_is_made_by_the_next_attempt",
        arguments={"ema": None},
    ),
    Mutant(
        "a damaged state is kept",
        {"async_flowrl.training.checkpoint:PackedState.digest": lambda digest: lambda state: mock.ANY},
        f"{RECOVERY}:test_a_state_that_arrives_damaged_ends_the_run_by_name",
        raises=("Failed",),
    ),
    Mutant(
        "the state that is on its way when an attempt ends is lost",
        {"async_flowrl.controller.kept_state:KeptStates.settle": nothing_awaited},
        f"{RECOVERY}:test_a_state_that_is_on_its_way_when_another_rank_dies_is_kept",
        raises=("AssertionError", "WorkerDied"),
    ),
    Mutant(
        "an evaluation ends with its attempt",
        {"async_flowrl.controller.after_step:AfterStep._unevaluated": only_before_training},
        "tests.unit.test_evaluations_beside_training:test_an_evaluation_that_its_attempt_did_not_finish_is_made_by_the_next",
        arguments={"k": 0, "number": 3},
    ),
)
