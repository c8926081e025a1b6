"""Mutant → the test that catches it. One row per planted fault."""

from tests.mutants.mutation import Mutant, Patch

TICKETS, DISPATCH, WEIGHTS = (
    "async_flowrl.tickets.table",
    "async_flowrl.controller.dispatch",
    "async_flowrl.controller.weights",
)
GANG, EVALUATION, RECEIVER = (
    "async_flowrl.controller.trainer",
    "async_flowrl.controller.evaluation",
    "checkpoint_engine.receiver",
)
LOOP, FAULTS, TABLE = "tests.unit.test_loop", "tests.unit.test_faults", "tests.unit.test_tickets"
PLAIN = "tests.unit.test_plain_loop:test_the_controller_trains_exactly_what_a_plain_loop_trains"
REFEREE = "tests.unit.algorithms.test_algorithm_referee"
STALE = {"mode": "one_step_off"}
HANGS = ("Deadlock", "HorizonReached", "Stalled")


def one(name: str, target: str, old: str, new: str, caught_by: str, **more: object) -> Mutant:
    """A mutant of one place."""
    return Mutant(name, (Patch(target, old, new),), caught_by, **more)  # type: ignore[arg-type]


GATE = (
    one(
        "gate off by one: the door refuses",
        f"{TICKETS}:Shape.version_for",
        "step - self.max_staleness",
        "step - self.max_staleness - 1",
        f"{LOOP}:test_staleness_is_exactly_the_smaller_of_step_and_k",
        arguments=STALE,
        raises=("Refused",),
    ),
    Mutant(
        "gate off by one, and nobody at the door",
        (
            Patch(f"{TICKETS}:Shape.version_for", "step - self.max_staleness", "step - self.max_staleness - 1"),
            Patch(f"{TICKETS}:TicketTable.hand_over", "self.shape.max_staleness:", "99:"),
            Patch(f"{TICKETS}:TicketTable.publish", "v < oldest", "v < oldest - 1"),
            Patch(f"{TICKETS}:TicketTable.acknowledge", "(self.shape.max_staleness + 1)", "99"),
            Patch(f"{RECEIVER}:Receiver.__init__", "self.capacity, self.alpha", "self.capacity, self.alpha"),
        ),
        f"{LOOP}:test_staleness_is_exactly_the_smaller_of_step_and_k",
        STALE,
        ("AssertionError", "WorkerFailed"),
    ),
    one(
        "samples are a version too fresh",
        f"{TICKETS}:Shape.version_for",
        "step - self.max_staleness",
        "step - max(0, self.max_staleness - 1)",
        f"{LOOP}:test_staleness_is_exactly_the_smaller_of_step_and_k",
        arguments=STALE,
    ),
    one(
        "first acknowledgement publishes to everybody",
        f"{TICKETS}:TicketTable.acknowledge",
        "    held.policy[version] = digest\n",
        "    for each in self.held.values():\n        each.policy[version] = digest\n",
        f"{LOOP}:test_every_version_is_acknowledged_by_everybody_before_it_is_served",
        raises=("AssertionError", "WorkerFailed"),
    ),
    one(
        "the table keeps a ring of K",
        f"{TICKETS}:TicketTable.acknowledge",
        "(self.shape.max_staleness + 1)",
        "self.shape.max_staleness",
        f"{LOOP}:test_staleness_does_not_depend_on_timing",
        arguments=STALE,
        raises=HANGS,
    ),
    one(
        "the worker keeps a ring of K",
        f"{RECEIVER}:Receiver.__init__",
        "tuple(streams), capacity, alpha, rank",
        "tuple(streams), max(1, capacity - 1), alpha, rank",
        f"{LOOP}:test_staleness_does_not_depend_on_timing",
        arguments=STALE,
        raises=("WorkerFailed",),
    ),
    one(
        "tickets are issued a step ahead of their weights' publication and start without them",
        f"{TICKETS}:TicketTable.next_for",
        "self._first_pending(TRAIN, held.policy)",
        "self._first_pending(TRAIN, range(99))",
        f"{LOOP}:test_the_weights_do_not_depend_on_workers_or_delays",
        arguments={"mode": "sync", "workers": 4},
        raises=("Refused",),
    ),
)

ORDER = (
    one(
        "the trainer takes groups in completion order",
        f"{GANG}:TrainerGroup._handed",
        "        await self._until_ready(ctx, step, most[:1])\n"
        "        ready = list(takewhile(partial(ctx.table.ready, step), most))\n",
        "        left = [g for g in groups if not (t := ctx.table.group(step, g)) or t[0].state != 'HANDED']\n"
        "        await ctx.ready.until(lambda: any(ctx.table.ready(step, g) for g in left))\n"
        "        ready = [next(g for g in left if ctx.table.ready(step, g))]\n",
        f"{LOOP}:test_the_trainer_consumes_in_ticket_order",
        arguments={"mode": "stream"},
    ),
    one(
        "a group is trained twice",
        f"{GANG}:TrainerGroup._train",
        "trained = [group for group in groups if group.meta is not None]",
        "trained = 2 * [group for group in groups if group.meta is not None]",
        f"{LOOP}:test_the_trainer_consumes_in_ticket_order",
        arguments={"mode": "stream"},
    ),
    one(
        "a late duplicate counts again",
        f"{TICKETS}:TicketTable.generated",
        "ticket.state not in (State.PENDING, State.RUNNING)",
        "ticket.state in FINAL",
        f"{TABLE}:test_a_dead_workers_ticket_runs_again_and_a_late_result_counts_once",
    ),
    one(
        "rewards go to the wrong images of a group",
        f"{DISPATCH}:score",
        "for ticket in group]",
        "for ticket in reversed(group)]",
        PLAIN,
        arguments={"k": 1},
    ),
    one(
        "rewards go to the wrong groups",
        f"{GANG}:TrainerGroup._hand_over",
        "zip(scored, found, strict=True)",
        "zip(scored, reversed(found), strict=True)",
        f"{LOOP}:test_batch_and_stream_make_the_same_weights",
        arguments={"k": 1},
    ),
    one(
        "a group without scores counts as trained",
        f"{TICKETS}:TicketTable.close_step",
        "State.SKIPPED if ticket.scores is None else State.TRAINED",
        "State.TRAINED",
        f"{TABLE}:test_groups_without_scores_are_skipped_and_counted",
    ),
)

WEIGHT = (
    one(
        "weights are acknowledged before they are verified",
        f"{RECEIVER}:Receiver._check_digests",
        "found != expected",
        "False",
        f"{FAULTS}:test_damaged_weights_are_sent_again",
        arguments={"number": 3, "what": "corrupt"},
    ),
    one(
        "stale adapter: activation copies nothing",
        f"{RECEIVER}:Receiver.activate",
        "self._live.copy_(storage)",
        "self._live.copy_(self._live)",
        f"{LOOP}:test_live_bytes_are_what_the_label_says",
        arguments=STALE,
        raises=("WeightsMismatch", "AssertionError"),
    ),
    one(
        "newest weights instead of those the ticket names",
        f"{RECEIVER}:Receiver.activate",
        "self._find(stream, version, slot)",
        "self._find(stream, max(v for s, _, v in self._held if s == slot), slot)",
        f"{LOOP}:test_the_weights_do_not_depend_on_workers_or_delays",
        arguments={"mode": "fully_async", "workers": 4},
        raises=("Refused", "AssertionError"),
    ),
    one(
        "a result of an earlier life is accepted",
        f"{TICKETS}:TicketTable.generated",
        "digest != expected",
        "False",
        f"{TABLE}:test_a_result_made_with_other_weights_is_refused",
        raises=("Failed",),
    ),
    one(
        "the label is taken when the ticket is finished",
        "async_flowrl.rollout.worker:RolloutWorker.generate",
        "request.version, digest",
        "self.receiver.held()[-1][1], digest",
        "tests.unit.rollout.test_worker:test_a_ticket_is_made_with_one_version_and_labelled_with_it",
    ),
    one(
        "weights arrive in the live tensors at once",
        f"{RECEIVER}:Receiver._keep",
        "    self._held[key] = (header, storage)\n",
        "    self._held[key] = (header, storage)\n        self._live.copy_(storage)\n",
        "tests.unit.rollout.test_worker:test_a_ticket_is_made_with_one_version_and_labelled_with_it",
    ),
    one(
        "a replacement serves without proof",
        f"{WEIGHTS}:PublishedWeights.welcome",
        "await self._prove(worker)",
        "pass",
        f"{FAULTS}:test_a_worker_that_computes_with_other_modules_never_serves",
        arguments={"name": "rollout-0.1"},
        raises=("Failed",),
    ),
    one(
        "a lost acknowledgement: nobody is woken",
        f"{WEIGHTS}:PublishedWeights._acknowledged",
        "self.ctx.work.notify(worker)",
        "pass",
        f"{LOOP}:test_staleness_is_exactly_the_smaller_of_step_and_k",
        arguments=STALE,
        raises=HANGS,
    ),
    one(
        "publishing waits for the delivery",
        f"{WEIGHTS}:PublishedWeights.publish",
        "await self.delivery.publish(version)",
        "await self.delivery.publish(version)\n    await self.delivery.drain()",
        f"{LOOP}:test_one_slow_acknowledgement_stalls_one_worker_only",
    ),
)

RECOVERY = (
    one(
        "a dead worker's ticket is never given out again",
        f"{TICKETS}:TicketTable.lost_worker",
        "self.retry(ticket)",
        "pass",
        f"{FAULTS}:test_a_worker_lost_while_it_makes_images_is_replaced",
        arguments={"what": "kill", "k": 1},
        raises=HANGS,
    ),
    one(
        "a hung worker is not killed",
        f"{DISPATCH}:replace_rollout",
        "dead.kill()",
        "pass",
        f"{FAULTS}:test_a_worker_lost_while_it_makes_images_is_replaced",
        arguments={"what": "hang", "k": 1},
    ),
    one(
        "nobody notices that a worker hangs",
        f"{DISPATCH}:generate",
        "ctx.config.deadlines.generate",
        "1e9",
        f"{FAULTS}:test_a_worker_lost_while_it_makes_images_is_replaced",
        arguments={"what": "hang", "k": 1},
        raises=HANGS,
    ),
    one(
        "nobody notices that a waiting worker dies",
        f"{DISPATCH}:next_ticket",
        "place.watch.done()",
        "False",
        f"{FAULTS}:test_a_worker_that_dies_while_it_waits_is_replaced_at_once",
    ),
    one(
        "a lost payload is not made again",
        f"{GANG}:make_again",
        "ctx.table.retry(ticket)",
        "pass",
        f"{FAULTS}:test_a_lost_payload_is_made_again",
        arguments={"what": "lose-trajectory", "state": "HANDED", "k": 1, "hand_over": "batch"},
        raises=HANGS,
    ),
    one(
        "a worker that dies over and over is replaced for ever",
        f"{DISPATCH}:serve",
        "losses > MAX_LOSSES_PER_SLOT",
        "False",
        f"{FAULTS}:test_a_place_that_loses_every_worker_ends_the_run_by_name",
        arguments={"method": "load", "what": "kill"},
        raises=(*HANGS, "AssertionError", "OverflowError"),
    ),
    one(
        "a ticket that kills its workers is tried for ever",
        f"{DISPATCH}:generate",
        "ticket.attempt >= MAX_TICKET_ATTEMPTS",
        "False",
        f"{FAULTS}:test_a_ticket_that_kills_every_worker_ends_the_run_by_name",
        raises=(*HANGS, "DeadlineExceeded"),
    ),
    one(
        "a failing reward is skipped whatever the policy",
        f"{DISPATCH}:score",
        'config.on_error == "fail"',
        "False",
        f"{FAULTS}:test_a_reward_that_always_fails_ends_the_run_by_name",
        arguments={"what": "nan", "error": Exception, "text": "RewardError"},
        raises=("Failed",),
    ),
    one(
        "NaN is a reward",
        "tests.support.toy_models:checked",
        "all(math.isfinite(number) for number in numbers)",
        "True",
        f"{FAULTS}:test_a_reward_that_fails_once_is_asked_again",
        arguments={"what": "nan"},
        raises=("ValueError",),
    ),
)

EVALUATIONS = (
    one(
        "an evaluation's weights stay for training",
        "async_flowrl.rollout.worker:RolloutWorker._activate",
        "return self._adopt(POLICY, request.version)\n",
        "active = self.receiver.active\n"
        "        return active.digest if active else self._adopt(POLICY, request.version)\n",
        "tests.unit.rollout.test_worker:test_evaluation_has_its_own_slot_and_leaves_nothing_behind",
    ),
    one(
        "an evaluation starts before its weights are there",
        f"{TICKETS}:TicketTable.next_for",
        "held.evaluation",
        "range(99)",
        f"{LOOP}:test_evaluation_changes_nothing_and_sees_its_own_version_only",
        arguments={"mode": "fully_async"},
        raises=("Refused",),
    ),
    one(
        "nobody compares what an evaluation was made with",
        f"{TICKETS}:TicketTable.generated",
        "(self.published if ticket.kind == TRAIN else self.evaluated).get(version)",
        "self.published.get(version) if ticket.kind == TRAIN else digest",
        f"{TABLE}:test_an_evaluation_made_with_other_weights_is_refused",
        raises=("Failed",),
    ),
    one(
        "an evaluation is labelled with the newest version",
        f"{EVALUATION}:Evaluations._run",
        "issue_evaluation(version=version",
        "issue_evaluation(version=max(ctx.table.published)",
        f"{LOOP}:test_a_second_evaluation_waits_for_the_first_and_loses_nothing",
        raises=(*HANGS, "AssertionError"),
    ),
    one(
        "an evaluation is a barrier",
        f"{EVALUATION}:Evaluations.start",
        "await ctx.weights.keep_for_evaluation(version)",
        "await ctx.weights.keep_for_evaluation(version)\n    return await self._run(ctx, version)",
        f"{LOOP}:test_evaluation_is_no_barrier",
    ),
)

TENSORS = (
    one(
        "missing √h",
        "async_flowrl.algorithms.sde:_diffusion",
        "g * torch.sqrt(-dt)",
        "g + 0 * dt",
        f"{REFEREE}:test_stale_estimators_with_correction_land",
        arguments={"name": "flow_grpo", "fields": {"sde_type": "sde", "noise_level": 0.7}},
    ),
    one(
        "wrong old log-prob: the current policy's",
        "async_flowrl.algorithms.policy_gradient:PolicyGradient._corrected",
        'anchor["log_prob"] - behaviour["log_prob"]',
        'anchor["log_prob"] - now["log_prob"]',
        f"{REFEREE}:test_stale_estimators_with_correction_land",
        arguments={"name": "flow_grpo", "fields": {"sde_type": "sde", "noise_level": 0.7}},
    ),
    one(
        "detached CFG branch",
        "async_flowrl.policies.qwen_image:QwenImagePolicy.velocity",
        "conditional, unconditional = both.chunk(2)",
        "conditional, unconditional = both.chunk(2)\n    unconditional = unconditional.detach()",
        "tests.unit.policies.test_qwen_image:test_gradients_flow_through_both_branches",
    ),
)

MUTANTS = (*GATE, *ORDER, *WEIGHT, *RECOVERY, *EVALUATIONS, *TENSORS)
