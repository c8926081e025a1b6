"""Planted faults in what ends a life and begins the next, and at the trainer's door; as in table.py."""

from tests.mutants.table import TABLE, TICKETS, one

LIVES_OF, SAVING, BOOKKEEPING = (
    "async_flowrl.run.recovery",
    "async_flowrl.controller.checkpoints",
    "async_flowrl.controller.after_step",
)
TEST = "tests.unit.test_recovery"

LIVES = (
    one(
        "nobody asks at the trainer's door what a ticket was made with",
        f"{TICKETS}:TicketTable.hand_over",
        "ticket.digest != self.published.get(ticket.version)",
        "False",
        f"{TABLE}:test_a_ready_ticket_made_with_other_weights_does_not_pass_the_trainers_door",
        arguments={"published": "of another life"},
        raises=("Failed",),
    ),
    one(
        "nobody asks at the trainer's door how old a ticket is",
        f"{TICKETS}:TicketTable.hand_over",
        "not 0 <= step - ticket.version <= self.shape.max_staleness",
        "False",
        f"{TABLE}:test_a_ready_ticket_of_another_version_does_not_pass_the_trainers_door",
        raises=("AssertionError", "Failed"),
    ),
    one(
        "metrics are not cut back when a trainer has died",
        f"{LIVES_OF}:recover",
        "run.ledgers.metrics.truncate(resume.version)",
        "pass",
        f"{TEST}:test_a_dead_trainer_goes_on_from_the_last_checkpoint",
        arguments={"method": "train_last_4"},
    ),
    one(
        "metrics are not cut back when a run is resumed",
        "tests.support.toy_recovery:open_ledgers",
        "metrics.truncate(resume.version)",
        "pass",
        f"{TEST}:test_a_killed_controller_and_resume",
        arguments={"seconds": 17.0, "workers": 1},
    ),
    one(
        "a return to a checkpoint is not recorded",
        f"{LIVES_OF}:recover",
        'run.ledgers.events.event("rollback", step=resume.version)',
        "pass",
        f"{TEST}:test_a_checkpoint_damaged_while_the_run_goes_on_is_passed_over",
    ),
    one(
        "a worker without a model goes on into the next life",
        f"{LIVES_OF}:clean_rollout",
        "worker.kill()",
        "pass",
        f"{TEST}:test_a_rollout_worker_that_cannot_forget_is_replaced",
        arguments={"what": "unloaded"},
        raises=("WorkerFailed",),
    ),
    one(
        "a hung worker goes on into the next life",
        f"{LIVES_OF}:clean_rollout",
        "DeadlineExceeded",
        "ZeroDivisionError",
        f"{TEST}:test_a_rollout_worker_that_cannot_forget_is_replaced",
        arguments={"what": "hang"},
        raises=("ExceptionGroup",),
    ),
    one(
        "a damaged checkpoint is taken",
        f"{SAVING}:find_checkpoint",
        "verify_checkpoint(path)",
        "pass",
        f"{TEST}:test_a_checkpoint_damaged_while_the_run_goes_on_is_passed_over",
        raises=("DamagedCheckpoint", "WorkerFailed"),
    ),
    one(
        "checkpoints of a history that has ended stay",
        f"{LIVES_OF}:drop_newer",
        "checkpoint_step(path) > step",
        "False",
        f"{TEST}:test_an_older_checkpoint_on_purpose",
    ),
    one(
        "a checkpoint that could not be written counts as saved",
        f"{SAVING}:Checkpoints._write",
        "        return\n    self.misses = 0",
        "        pass\n    self.misses = 0",
        f"{TEST}:test_the_last_checkpoint_is_insisted_on",
        arguments={"misses": 1},
    ),
    one(
        "missed checkpoints are never an error",
        f"{SAVING}:Checkpoints._write",
        "self.misses >= MAX_MISSED_CHECKPOINTS",
        "False",
        f"{TEST}:test_a_disk_that_stays_full_ends_the_run_by_name",
        raises=("Failed",),
    ),
    one(
        "the last checkpoint may be missing",
        f"{BOOKKEEPING}:AfterStep.drain",
        "self.checkpoints.insist(",
        "self.checkpoints.save(",
        f"{TEST}:test_the_last_checkpoint_is_insisted_on",
        arguments={"misses": 2},
    ),
    one(
        "an evaluation ends with its life",
        f"{BOOKKEEPING}:AfterStep._unevaluated",
        "return [version for version in due if version >= now - kept]",
        "return [0] if now == 0 else []",
        f"{TEST}:test_an_evaluation_that_its_life_did_not_finish_is_made_by_the_next",
        arguments={"k": 0, "number": 3},
    ),
)
