"""Dispatch: gives tickets to the rollout workers through the gate, replaces dead workers, and asks for rewards.

The gate is the rule of the ticket table that a worker gets a ticket only if it holds the version that it names.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap

from async_flowrl.controller.admission import StartError, admit
from async_flowrl.controller.context import Context
from async_flowrl.controller.deadlines import TICKETS_PER_WORKER
from async_flowrl.controller.endpoints import SenderFailed, SenderLost
from async_flowrl.controller.pool_size import change_size, leave, refuse
from async_flowrl.controller.scoring import Free, ask_held_out, ask_reward, free_workers
from async_flowrl.tickets.request import batch_of
from async_flowrl.tickets.table import TRAIN, Payload, State, Ticket, describe
from async_flowrl.types import ACTIVATE, RolloutReport, RolloutRequest
from separation.group import NoSeat, RefLost, Worker, WorkerDied, WorkerFailed, seated
from separation.node import OtherCode
from separation.supervise import DeadlineExceeded, together

logger = logging.getLogger(__name__)

# Errors of a call after which a rollout worker counts as lost: it is killed and replaced.
LOST = (WorkerDied, DeadlineExceeded)
# Errors of a replacement that cannot serve. An elastic pool goes on without it, because its node may be the reason; in
# a pool of fixed size the error ends the run.
UNFIT = (WorkerFailed, StartError, OtherCode)
# Pause before the second lost worker in a row is replaced. The pause before the n-th is 2^(n-1) - 1 times as long;
# there is none before the first.
BACKOFF_SECONDS = 1.0


@dataclass
class Slot:
    """One slot of the rollout pool, i.e. one index of it, with the worker that has this index at present."""

    worker: Worker
    watch: asyncio.Task[WorkerDied]  # Task that returns the worker's death (`death_of`).
    # Number of tickets in the worker's open calls, with those that are only computed along (`generate`).
    given: int = 0
    finished: bool = False  # True once the worker has returned a ticket.


class TicketLost(RuntimeError):
    """Raised if a ticket was lost `limits.ticket_attempts` times."""


async def dispatch(ctx: Context) -> None:
    """Serves all rollout workers until it is cancelled; raises the first error of a worker's coroutine in a group."""
    free = free_workers(ctx)
    async with asyncio.TaskGroup() as tasks:

        def start(index: int) -> None:
            tasks.create_task(serve(ctx, index, free, tasks), name=f"rollout-{index}")

        for worker in ctx.rollout.workers:
            start(worker.index)
        if ctx.rollout.growth is not None:
            tasks.create_task(change_size(ctx, ctx.rollout.growth, start), name="size of the rollout pool")


async def serve(ctx: Context, index: int, free: Free, tasks: asyncio.TaskGroup) -> None:
    """Gives tickets to the worker of one slot and replaces it when it is lost, until the slot ends.

    The slot ends if its node is drained, or if no node of an elastic pool has a seat for a replacement. Raises the last
    error after more than `limits.workers_lost_in_a_row` losses, and SenderLost, SenderFailed or SenderLate.
    """
    slot = filled(ctx, seated(ctx.rollout, index), tasks)
    error_before: Exception | None = None
    losses = 0
    while True:
        try:
            if error_before is not None:
                pause = BACKOFF_SECONDS * (2 ** (losses - 1) - 1)
                slot, error_before = (
                    filled(ctx, await replace_rollout(ctx, index, error_before, pause=pause), tasks),
                    None,
                )
            async with ctx.draining.in_time(slot.worker.name):
                await together(*(work(ctx, slot, free, tasks) for _ in range(TICKETS_PER_WORKER)))
            return await leave(ctx, slot.worker, "its node is drained")
        except SenderLost:  # Among the errors in LOST, but a trainer rank's death.
            raise
        except NoSeat as error:
            return await leave(ctx, seated(ctx.rollout, index), f"{error_before}; {error}")
        except LOST as error:
            error_before, losses = error, 1 if slot.finished else losses + 1
            slot.finished = False
            if losses > ctx.config.limits.workers_lost_in_a_row:
                error.add_note(f"slot {index} of the rollout pool lost {losses} workers without a finished ticket")
                raise


def filled(ctx: Context, worker: Worker, tasks: asyncio.TaskGroup) -> Slot:
    return Slot(worker, tasks.create_task(death_of(ctx, worker), name=f"watch {worker.name}"))


async def work(ctx: Context, slot: Slot, free: Free, tasks: asyncio.TaskGroup) -> None:
    """Gives the worker batch after batch until it must leave, and starts the scoring of whole groups.

    Raises the errors in `LOST`, TicketLost, and the worker's other errors.
    """
    while (ticket := await next_ticket(ctx, slot)) is not None:
        accepted_tickets = await generate(ctx, slot, together_with(ctx, ticket))
        slot.finished = True
        # A batch can contain several tickets of one group; the group is scored once.
        for accepted in {ticket.group: ticket for ticket in accepted_tickets}.values():
            if group := ctx.table.to_score(accepted):
                tasks.create_task(score(ctx, group, free), name=f"score {describe(accepted)}")


async def death_of(ctx: Context, worker: Worker) -> WorkerDied:
    """Waits until the worker dies, wakes the coroutines that wait at the gate, and returns the death."""
    try:
        await worker.watch()
    except WorkerDied as death:
        ctx.work.notify()
        return death


async def next_ticket(ctx: Context, slot: Slot) -> Ticket | None:
    """Waits until the gate has a ticket for the slot's worker; returns None if it must leave. Raises WorkerDied."""
    name = slot.worker.name
    while True:
        if slot.watch.done():
            raise slot.watch.result()
        if name not in ctx.table.held:
            raise WorkerDied(name, "it was given up while it waited")
        if name in ctx.draining:
            return None
        if slot.given:
            await asyncio.sleep(0)  # Lets workers without a ticket ask first.
        if (ticket := at_the_gate(ctx, slot)) is not None:
            return ticket
        if not slot.given:
            ctx.observer.state(name, f"wait_{ctx.table.blocked()}")
        await ctx.work.wait(name)


def at_the_gate(ctx: Context, slot: Slot) -> Ticket | None:
    """Returns the worker's next ticket, or None if the gate has none now.

    A worker whose process trains counts as busy for tickets of later steps, as another worker may be idle; but the step
    in training may itself wait for a ticket whose images were lost.
    """
    name, size = slot.worker.name, ctx.config.rollout.tickets_per_batch
    ticket = ctx.table.next_for(name, ahead=slot.given > 0, together=size)
    if ticket is None or not ctx.placement.trains(slot.worker.index) or ticket.step <= ctx.table.step:
        return ticket
    return ctx.table.next_for(name, ahead=True, together=size)


def together_with(ctx: Context, ticket: Ticket) -> list[Ticket]:
    """Returns the tickets, of any state, that go through the network together with `ticket`, it itself included."""
    size = ctx.config.rollout.tickets_per_batch
    if size == 1 or ticket.kind != TRAIN:
        return [ticket]
    return batch_of(ctx.table, ticket, size, ctx.requests.batch_order(ticket.step))


async def generate(ctx: Context, slot: Slot, batch: Sequence[Ticket]) -> list[Ticket]:
    """Has the worker make the batch's PENDING tickets; returns those whose result was accepted.

    The others are computed along and dropped, because a ticket's bits depend on the whole batch. Raises TicketLost,
    Refused if other weights than the ticket's made its images, DeadlineExceeded, WorkerDied or WorkerFailed.
    """
    worker, pending = slot.worker, [ticket for ticket in batch if ticket.state is State.PENDING]
    ordinals = tuple(ticket.ordinal for ticket in batch) if len(batch) > 1 else ()
    for ticket in pending:
        if (failures := ticket.attempt - ticket.handed_back) >= ctx.config.limits.ticket_attempts:
            raise TicketLost(f"{describe(ticket)} was lost {failures} times; see the faults in events.jsonl")
        ctx.table.start(ticket, worker.name, batch=ordinals, along=ticket is not pending[0])
    ctx.observer.state(worker.name, "busy")
    slot.given += len(batch)
    try:
        async with ctx.placement.time_for_tickets(worker, slot.given, f"generate: {describe(pending[0])}"):
            reports, payloads = await ask(worker, [ctx.requests.request(ticket) for ticket in batch])
    finally:
        slot.given -= len(batch)
    # Of those computed along, too.
    ctx.swaps += sum(report.swaps for report in reports)
    activations = (span for report in reports for span in report.spans if span.name == ACTIVATE)
    ctx.activation += sum(span.end - span.start for span in activations)
    accepted = []
    for ticket, report, payload in zip(batch, reports, payloads, strict=True):
        needed = ticket in pending
        # The first report has the spans of the whole batch, also if its own ticket is only computed along.
        for span in report.spans:
            ctx.observer.span(worker.name, span, ordinal=(ticket if needed else pending[0]).ordinal)
        if needed and ctx.table.generated(ticket, version=report.version, digest=report.digest, payload=payload):
            accepted.append(ticket)
    return accepted


async def ask(worker: Worker, requests: list[RolloutRequest]) -> tuple[Sequence[RolloutReport], list[Payload]]:
    reports, refs = await worker.call_split("generate", requests, returns=1 + 2 * len(requests))
    return reports, list(starmap(Payload, zip(refs[::2], refs[1::2], strict=True)))


async def replace_rollout(ctx: Context, index: int, death: BaseException, *, pause: float) -> Worker:
    """Kills a lost worker, makes its tickets PENDING, and returns its replacement with proven weights, after `pause`
    seconds.

    Raises NoSeat if an elastic pool gets none (in a pool of fixed size: the error of `UNFIT`), and SenderLost,
    SenderFailed or SenderLate.
    """
    dead = seated(ctx.rollout, index)
    ctx.weights.record_loss(dead.name, death)
    logger.warning("%s is lost: %s", dead.name, death)
    dead.kill()
    ctx.table.lost_worker(dead.name)
    await ctx.weights.leave(dead.name)
    ctx.work.notify()
    ctx.observer.state(dead.name, "gone")
    await asyncio.sleep(pause)
    try:
        fresh = await ctx.rollout.replace(index)
        await admit(ctx, fresh)
    except SenderFailed:  # Among the errors in UNFIT, but a trainer rank's failure.
        raise
    except UNFIT as error:
        if ctx.rollout.growth is None:
            raise
        refuse(ctx, seated(ctx.rollout, index).name, error)
        raise NoSeat(f"its replacement cannot serve: {error}") from error
    return fresh


async def score(ctx: Context, group: list[Ticket], free: Free) -> None:
    """Records a group's scores, from the score log if it has them; makes the group again if images are lost."""
    log = ctx.score_log if group[0].kind == TRAIN else None
    if log is not None and group in log:
        scores = log[group]
    else:
        try:
            scores = await ask_reward(ctx, group, free)
            await ask_held_out(ctx, group, free)
        except RefLost as lost:
            make_again(ctx, group, lost)
            return
        if log is not None:
            await log.append(group, scores, step=ctx.table.step)
    first = group[0]
    for term, failure in scores.failed.items() if scores is not None and first.kind == TRAIN else ():
        ctx.observer.event("unscored", step=first.step, group=first.group, term=term, message=failure.reason)
    ctx.table.scored(group, scores)
    ctx.ready.notify()


def make_again(ctx: Context, tickets: Sequence[Ticket], lost: RefLost) -> None:
    """Makes tickets whose images or trajectories are lost PENDING again; their new results have the same bits."""
    ctx.observer.event("fault", worker=tickets[0].worker, kind="RefLost", message=str(lost))
    for ticket in tickets:
        ctx.table.retry(ticket)
    ctx.work.notify()
