"""Dispatch: feeds the rollout workers through the gate, and the reward workers behind them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from async_flowrl.controller.admission import StartError, admit
from async_flowrl.controller.context import TICKETS_PER_WORKER, Context, book_span
from async_flowrl.controller.held_out import ask_held_out
from async_flowrl.controller.pool_size import change_size, leave, refuse
from async_flowrl.controller.scoring import Free, ask_reward, free_workers
from async_flowrl.controller.shared import ticket_deadline
from async_flowrl.tickets.table import TRAIN, State, Ticket, describe
from async_flowrl.types import RolloutReport, RolloutRequest
from separation.group import NoSeat, Ref, RefLost, Worker, WorkerDied, WorkerFailed, seated
from separation.node_checks import OtherCode
from separation.supervise import DeadlineExceeded, together

LOST = (WorkerDied, DeadlineExceeded)
"""What a worker raises that is gone, or as good as gone: it is killed and replaced."""
UNFIT = (WorkerFailed, StartError, OtherCode)
"""What a successor raises that cannot serve. A pool that grows and shrinks goes on without it, as its node may be the
reason; of a pool whose size is fixed it ends the run."""
MAX_LOSSES_PER_SLOT = 4
"""Workers that one slot may lose in a row without a finished ticket between them; one more ends the run."""
MAX_TICKET_ATTEMPTS = 6
"""Attempts at one ticket; when one more is due, the run ends: the ticket itself probably kills its workers."""
BACKOFF_SECONDS = 1.0
"""Pause before the second of several losses in a row is replaced; doubled each time."""


@dataclass
class Slot:
    """One slot of the rollout pool, with the worker that is in it now."""

    worker: Worker
    watch: asyncio.Task[WorkerDied]
    given: int = 0
    """Tickets that the worker has now."""
    finished: bool = False
    """Whether the worker has made any."""


class TicketLost(RuntimeError):
    """A ticket was lost again and again."""


async def dispatch(ctx: Context) -> None:
    """Runs until it is cancelled; the first failure of any worker's coroutine ends it, by name."""
    free = free_workers(ctx)
    async with asyncio.TaskGroup() as tasks:

        def start(index: int) -> None:
            tasks.create_task(serve(ctx, index, free, tasks), name=f"rollout-{index}")

        for worker in ctx.rollout.workers:
            start(worker.index)
        if ctx.rollout.growth is not None:
            tasks.create_task(change_size(ctx, ctx.rollout.growth, start), name="size of the rollout pool")


async def serve(ctx: Context, index: int, free: Free, tasks: asyncio.TaskGroup) -> None:
    """Keeps the worker of one slot of the rollout pool in tickets, and replaces a dead one, until the slot is given up.

    A worker whose node is drained leaves when it has finished its tickets or handed them back; a lost one, when no node
    has a seat for its successor.
    """
    slot = filled(ctx, seated(ctx.rollout, index), tasks)
    lost: Exception | None = None
    losses = 0
    while True:
        try:
            if lost is not None:
                pause = BACKOFF_SECONDS * (2 ** (losses - 1) - 1)
                slot, lost = filled(ctx, await replace_rollout(ctx, index, lost, pause=pause), tasks), None
            async with ctx.departures.in_time(slot.worker.name):
                await together(*(work(ctx, slot, free, tasks) for _ in range(TICKETS_PER_WORKER)))
            return await leave(ctx, slot.worker, "its node is drained")
        except NoSeat as error:
            return await leave(ctx, seated(ctx.rollout, index), f"{lost}; {error}")
        except LOST as error:
            lost, losses = error, 1 if slot.finished else losses + 1
            slot.finished = False
            if losses > MAX_LOSSES_PER_SLOT:
                error.add_note(f"slot {index} of the rollout pool lost {losses} workers without a finished ticket")
                raise


def filled(ctx: Context, worker: Worker, tasks: asyncio.TaskGroup) -> Slot:
    """A slot with a worker that has not made any ticket yet."""
    return Slot(worker, tasks.create_task(death_of(ctx, worker), name=f"watch {worker.name}"))


async def work(ctx: Context, slot: Slot, free: Free, tasks: asyncio.TaskGroup) -> None:
    """Gives the slot's worker the ticket that the gate has for it, over and over, until it is to leave.

    Raises what `LOST` names.
    """
    while (ticket := await next_ticket(ctx, slot)) is not None:
        made = await generate(ctx, slot, batch_of(ctx, ticket))
        slot.finished = True
        # A batch can bring several tickets of one group, which is scored once.
        for accepted in {ticket.group: ticket for ticket in made}.values():
            if group := ctx.table.to_score(accepted):
                tasks.create_task(score(ctx, group, free), name=f"score {describe(accepted)}")


async def death_of(ctx: Context, worker: Worker) -> WorkerDied:
    """Returns the worker's death once it has happened, and wakes what waits at the gate."""
    try:
        await worker.watch()
    except WorkerDied as death:
        ctx.work.notify()
        return death


async def next_ticket(ctx: Context, slot: Slot) -> Ticket | None:
    """Waits at the gate; the wait is booked as missing weights or missing work. Raises WorkerDied.

    None for a worker that is to leave.
    """
    name = slot.worker.name
    while True:
        if slot.watch.done():
            raise slot.watch.result()
        if name not in ctx.table.held:
            raise WorkerDied(name, "it was given up while it waited")
        if name in ctx.departures:
            return None
        if slot.given:
            await asyncio.sleep(0)  # Workers without a ticket come first.
        if (ticket := at_the_gate(ctx, slot)) is not None:
            return ticket
        if not slot.given:
            ctx.observer.state(name, f"wait_{ctx.table.blocked(name)}")
        await ctx.work.wait(name)


def at_the_gate(ctx: Context, slot: Slot) -> Ticket | None:
    """The worker's next ticket. Of a worker that trains now, too, one of a later step is as if given ahead: others may
    be free for it. What is trained may wait for one of its own step, whose images were lost."""
    name, size = slot.worker.name, ctx.config.rollout.tickets_per_batch
    ticket = ctx.table.next_for(name, ahead=slot.given > 0, together=size)
    if ticket is None or slot.worker.index not in ctx.training or ticket.step <= ctx.table.step:
        return ticket
    return ctx.table.next_for(name, ahead=True, together=size)


def batch_of(ctx: Context, ticket: Ticket) -> list[Ticket]:
    """The ticket and those that go through the network with it, in order, whatever has become of them already."""
    size = ctx.config.rollout.tickets_per_batch
    return ctx.table.batch(ticket, size) if size > 1 and ticket.kind == TRAIN else [ticket]


async def generate(ctx: Context, slot: Slot, batch: Sequence[Ticket]) -> list[Ticket]:
    """Has those of the batch made that wait to be, along with the others, so that their bits are always the same.

    Returns those whose result was the first. Raises TicketLost for one that was lost too often.
    """
    worker, wanted = slot.worker, [ticket for ticket in batch if ticket.state is State.PENDING]
    for ticket in wanted:
        if ticket.attempt - ticket.handed_back >= MAX_TICKET_ATTEMPTS:
            raise TicketLost(f"{describe(ticket)} was lost {ticket.attempt} times; see the faults in events.jsonl")
        ctx.table.start(ticket, worker.name, along=ticket is not wanted[0])
    ctx.observer.state(worker.name, "busy")
    slot.given += len(batch)
    try:
        async with ticket_deadline(ctx.config, worker, slot.given, f"generate: {describe(wanted[0])}"):
            reports, payload = await ask(worker, [ctx.requests.request(ticket) for ticket in batch])
    finally:
        slot.given -= len(batch)
    parts = [payload[2 * index : 2 * index + 2] for index in range(len(batch))]
    results = [(t, r, p) for t, r, p in zip(batch, reports, parts, strict=True) if t in wanted]
    return [ticket for ticket, report, part in results if accept(ctx, worker, ticket, report, part)]


async def ask(worker: Worker, requests: list[RolloutRequest]) -> tuple[Sequence[RolloutReport], tuple[Ref, ...]]:
    """One report per request; then each request's images and trajectory, one after the other."""
    if len(requests) == 1:
        report, payload = await worker.call_split("generate", requests[0], returns=3)
        return [report], payload
    return await worker.call_split("generate_together", requests, returns=1 + 2 * len(requests))


def accept(ctx: Context, worker: Worker, ticket: Ticket, report: RolloutReport, payload: object) -> bool:
    """Checks a result at the table's door and books its spans and swaps; False for a duplicate."""
    ctx.swaps.add(report.swaps)
    for span in report.spans:
        book_span(ctx.observer, worker.name, span, ordinal=ticket.ordinal)
    return ctx.table.generated(ticket, version=report.version, digest=report.digest, payload=payload)


async def replace_rollout(ctx: Context, index: int, death: BaseException, *, pause: float) -> Worker:
    """Kills a dead (or hung) worker, whose tickets then wait for another; its successor joins with proven weights."""
    dead = seated(ctx.rollout, index)
    ctx.observer.event("fault", worker=dead.name, kind=type(death).__name__, message=str(death))
    dead.kill()
    ctx.table.lost_worker(dead.name)
    await ctx.weights.leave(dead.name)
    ctx.work.notify()
    ctx.observer.state(dead.name, "gone")
    await asyncio.sleep(pause)
    try:
        fresh = await ctx.rollout.replace(index)
        await admit(ctx, fresh)
    except UNFIT as error:
        if ctx.rollout.growth is None:
            raise
        refuse(ctx, seated(ctx.rollout, index).name, error)
        raise NoSeat(f"its successor cannot serve: {error}") from error
    return fresh


async def score(ctx: Context, group: list[Ticket], free: Free) -> None:
    """Gives a whole group its scores: those of an earlier attempt, if they are written down. Lost images are remade."""
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
    """A payload is gone, with its node: the tickets go back to PENDING and come again, bit for bit the same."""
    ctx.observer.event("fault", worker=tickets[0].worker, kind="RefLost", message=str(lost))
    for ticket in tickets:
        ctx.table.retry(ticket)
    ctx.work.notify()
