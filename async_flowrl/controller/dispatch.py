"""Feeds the rollout workers through the gate and the reward workers behind them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from async_flowrl.controller.context import Context, book_span
from async_flowrl.tickets.table import Ticket, describe
from async_flowrl.types import RolloutReport, Scores
from separation.group import RefLost, Worker, WorkerDied, WorkerFailed
from separation.supervise import DeadlineExceeded, deadline, together

LOST = (WorkerDied, DeadlineExceeded)
"""A worker that is gone, or as good as gone: it is killed and its place filled again."""
MAX_LOSSES_PER_SLOT = 4
"""Workers that one place may lose in a row, without a finished ticket between them, before the run ends."""
MAX_TICKET_ATTEMPTS = 6
"""A ticket that had to be made more often than this ends the run: it seems to kill whoever makes it."""
TICKETS_PER_WORKER = 2
"""Tickets a worker may have: the one it makes, and the next, so that it need not wait for an answer and a call."""
BACKOFF_SECONDS = 1.0
"""Seconds before the second of several losses in a row is replaced; doubled each time."""


@dataclass
class Place:
    """One place in the rollout pool, and who has it."""

    worker: Worker
    watch: asyncio.Task[WorkerDied]
    given: int = 0
    """Tickets that the worker has now."""
    finished: bool = False
    """Whether it has made any."""


class TicketLost(RuntimeError):
    """A ticket was lost again and again."""


class StartError(RuntimeError):
    """A worker came up, but it does not fit the others."""


async def dispatch(ctx: Context) -> None:
    """Runs until it is cancelled; the first failure of any worker's coroutine ends it, by name."""
    free: asyncio.Queue[int] = asyncio.Queue()
    for index in range(len(ctx.reward.workers)):
        free.put_nowait(index)
    async with asyncio.TaskGroup() as tasks:
        for index in range(len(ctx.rollout.workers)):
            tasks.create_task(serve(ctx, index, free, tasks), name=f"rollout-{index}")


async def serve(ctx: Context, index: int, free: asyncio.Queue[int], tasks: asyncio.TaskGroup) -> None:
    """One place in the rollout pool: keeps its worker in tickets, and replaces a dead one."""
    place = seat(ctx, ctx.rollout.workers[index], tasks)
    lost: Exception | None = None
    losses = 0
    while True:
        try:
            if lost is not None:
                pause = BACKOFF_SECONDS * (2 ** (losses - 1) - 1)
                place, lost = seat(ctx, await replace_rollout(ctx, index, lost, pause=pause), tasks), None
            await together(*(work(ctx, place, free, tasks) for _ in range(TICKETS_PER_WORKER)))
        except LOST as error:
            lost, losses = error, 1 if place.finished else losses + 1
            place.finished = False
            if losses > MAX_LOSSES_PER_SLOT:
                error.add_note(f"place {index} of the rollout pool lost {losses} workers without a finished ticket")
                raise


def seat(ctx: Context, worker: Worker, tasks: asyncio.TaskGroup) -> Place:
    return Place(worker, tasks.create_task(death_of(ctx, worker), name=f"watch {worker.name}"))


async def work(ctx: Context, place: Place, free: asyncio.Queue[int], tasks: asyncio.TaskGroup) -> None:
    """One of a place's hands: takes the ticket the gate gives it, over and over. Raises what `LOST` names."""
    while True:
        ticket = await next_ticket(ctx, place)
        accepted = await generate(ctx, place, ticket)
        place.finished = True
        if accepted and (group := ctx.table.to_score(ticket)):
            tasks.create_task(score(ctx, group, free), name=f"score {describe(ticket)}")


async def death_of(ctx: Context, worker: Worker) -> WorkerDied:
    """The worker's death, once it has happened; whoever waits at the gate is told."""
    try:
        await worker.watch()
    except WorkerDied as death:
        ctx.work.notify()
        return death


async def next_ticket(ctx: Context, place: Place) -> Ticket:
    """Waits at the gate; the wait is booked as missing weights or missing work. Raises WorkerDied."""
    name = place.worker.name
    while True:
        if place.watch.done():
            raise place.watch.result()
        if name not in ctx.table.held:
            raise WorkerDied(name, "it was given up while it waited")
        if place.given:
            await asyncio.sleep(0)  # whoever has nothing to do comes first
        if (ticket := ctx.table.next_for(name, ahead=place.given > 0)) is not None:
            return ticket
        if not place.given:
            ctx.observer.state(name, f"wait_{ctx.table.blocked(name)}")
        await ctx.work.wait(name)


async def generate(ctx: Context, place: Place, ticket: Ticket) -> bool:
    """Has the ticket made; False if another attempt was first. Raises TicketLost for one that was lost too often."""
    if ticket.attempt >= MAX_TICKET_ATTEMPTS:
        raise TicketLost(f"{describe(ticket)} was lost {ticket.attempt} times; see the faults in events.jsonl")
    worker = place.worker
    ctx.table.start(ticket, worker.name)
    ctx.observer.state(worker.name, "busy")
    place.given += 1
    try:
        async with deadline(ctx.config.deadlines.generate * place.given, f"generate: {describe(ticket)}"):
            report, payload = await worker.call_split("generate", ctx.requests.request(ticket), returns=3)
    finally:
        place.given -= 1
    return accept(ctx, worker, ticket, report, payload)


def accept(ctx: Context, worker: Worker, ticket: Ticket, report: RolloutReport, payload: object) -> bool:
    """Checks a result at the table's door and books its spans; False for a duplicate."""
    for span in report.spans:
        book_span(ctx.observer, worker.name, span, ordinal=ticket.ordinal)
    return ctx.table.generated(ticket, version=report.version, digest=report.digest, payload=payload)


async def replace_rollout(ctx: Context, index: int, death: BaseException, *, pause: float) -> Worker:
    """A dead (or hung) worker is killed, its tickets wait for another; its replacement joins with proven weights."""
    dead = ctx.rollout.workers[index]
    ctx.observer.event("fault", worker=dead.name, kind=type(death).__name__, message=str(death))
    dead.kill()
    ctx.table.lost_worker(dead.name)
    await ctx.weights.leave(dead.name)
    ctx.work.notify()
    ctx.observer.state(dead.name, "gone")
    await asyncio.sleep(pause)
    fresh = await ctx.rollout.replace(index)
    ctx.observer.event("worker", worker=fresh.name, pid=fresh.pid, node=fresh.node)
    check_base(fresh, await load_rollout(fresh, seconds=ctx.config.deadlines.load), ctx.base_digest)
    ctx.observer.state(fresh.name, "sync")
    ctx.table.join(fresh.name)
    await ctx.weights.welcome(fresh)
    return fresh


async def score(ctx: Context, group: list[Ticket], free: asyncio.Queue[int]) -> None:
    """One call for the whole group, on the next free reward worker, retried with back-off. Lost images are remade."""
    config = ctx.config.reward
    images = [ticket.payload[0] for ticket in group]
    for attempt in range(config.retries + 1):
        index = await free.get()
        try:
            scores = await score_once(ctx, index, group, images)
            break
        except RefLost as lost:
            make_again(ctx, group, lost)
            return
        except (WorkerDied, WorkerFailed, DeadlineExceeded) as error:
            await reward_failed(ctx, index, error)
            if attempt == config.retries:
                if config.on_error == "fail":
                    raise
                ctx.observer.event("skipped", step=group[0].step, group=group[0].group, message=str(error))
                scores = None
                break
        finally:
            free.put_nowait(index)
        await asyncio.sleep(config.backoff * 2**attempt)
    ctx.table.scored(group, scores)
    ctx.ready.notify()


def make_again(ctx: Context, tickets: Sequence[Ticket], lost: RefLost) -> None:
    """A payload is gone, with its node: the tickets go back to PENDING and come again, bit for bit the same."""
    ctx.observer.event("fault", worker=tickets[0].worker, kind="RefLost", message=str(lost))
    for ticket in tickets:
        ctx.table.retry(ticket)
    ctx.work.notify()


async def score_once(ctx: Context, index: int, group: list[Ticket], images: list[object]) -> Scores:
    worker = ctx.reward.workers[index]
    ctx.observer.state(worker.name, "busy")
    async with deadline(ctx.config.deadlines.score, f"score: {describe(group[0])} on {worker.name}"):
        scores: Scores = await worker.call("score", ctx.requests.prompt(group[0]), *images)
    for span in scores.spans:
        book_span(ctx.observer, worker.name, span)
    ctx.observer.state(worker.name, "wait_data")
    return scores


async def reward_failed(ctx: Context, index: int, error: Exception) -> None:
    worker = ctx.reward.workers[index]
    ctx.observer.event("fault", worker=worker.name, kind=type(error).__name__, message=str(error))
    if not isinstance(error, WorkerFailed):
        worker.kill()
        await ctx.reward.replace(index)


async def load_rollout(worker: Worker, *, seconds: float) -> str:
    """Builds the worker's model; returns the digest of its base weights."""
    async with deadline(seconds, f"load: model of {worker.name}"):
        loaded = await worker.call("load")
    return str(loaded["base_digest"])


def check_base(worker: Worker, found: str, expected: str) -> None:
    """Raises StartError unless the worker's base weights are the trainer's."""
    if found != expected:
        raise StartError(
            f"{worker.name} and the trainer hold different base weights ({found} and {expected}): model.path or its "
            "revision differs between nodes"
        )
