"""Feeds the rollout workers through the gate and the reward workers behind them."""

import asyncio

from async_flowrl.context import Context
from async_flowrl.tickets import Ticket, describe
from async_flowrl.types import RolloutReport, Scores
from separation.group import Worker, WorkerDied, WorkerFailed
from separation.supervise import DeadlineExceeded, deadline


async def dispatch(ctx: Context) -> None:
    """Runs until it is cancelled; the first failure of any worker's coroutine ends it, by name."""
    free: asyncio.Queue[int] = asyncio.Queue()
    for index in range(len(ctx.reward.workers)):
        free.put_nowait(index)
    async with asyncio.TaskGroup() as tasks:
        for index in range(len(ctx.rollout.workers)):
            tasks.create_task(serve(ctx, index, free, tasks), name=f"rollout-{index}")


async def serve(ctx: Context, index: int, free: asyncio.Queue[int], tasks: asyncio.TaskGroup) -> None:
    """One place in the rollout pool: takes the ticket the gate gives it, over and over, and replaces a dead worker."""
    worker = ctx.rollout.workers[index]
    while True:
        try:
            ticket = await next_ticket(ctx, worker)
            await generate(ctx, worker, ticket)
        except (WorkerDied, DeadlineExceeded) as death:
            worker = await replace_rollout(ctx, index, death)
            continue
        if group := ctx.table.to_score(ticket):
            tasks.create_task(score(ctx, group, free), name=f"score {describe(ticket)}")


async def next_ticket(ctx: Context, worker: Worker) -> Ticket:
    """Waits at the gate; the wait is booked as missing weights or missing work."""
    while True:
        if worker.name not in ctx.table.held:
            raise WorkerDied(worker.name, "it was given up while it waited")
        if (ticket := ctx.table.next_for(worker.name)) is not None:
            return ticket
        ctx.observer.state(worker.name, f"wait_{ctx.table.blocked(worker.name)}")
        await ctx.work.wait()


async def generate(ctx: Context, worker: Worker, ticket: Ticket) -> None:
    ctx.table.start(ticket, worker.name)
    ctx.observer.state(worker.name, "busy")
    async with deadline(ctx.config.deadlines.generate, f"generate: {describe(ticket)}"):
        report, payload = await worker.call_split("generate", ctx.recipe.request(ticket), returns=3)
    accept(ctx, worker, ticket, report, payload)


def accept(ctx: Context, worker: Worker, ticket: Ticket, report: RolloutReport, payload: object) -> None:
    """Checks a result at the table's door and books its spans."""
    for span in report.spans:
        ctx.observer.event(
            "span", worker=worker.name, name=span.name, start=span.start, end=span.end, ordinal=ticket.ordinal
        )
    ctx.table.generated(ticket, version=report.version, digest=report.digest, payload=payload)


async def replace_rollout(ctx: Context, index: int, death: BaseException) -> Worker:
    """A dead (or hung) worker: its tickets wait for another, it is killed, its replacement joins with proven weights."""
    dead = ctx.rollout.workers[index]
    ctx.observer.event("fault", worker=dead.name, kind=type(death).__name__, message=str(death))
    dead.kill()
    ctx.table.lost_worker(dead.name)
    await ctx.weights.leave(dead.name)
    ctx.work.notify()
    ctx.observer.state(dead.name, "gone")
    fresh = await ctx.rollout.replace(index)
    ctx.observer.event("worker", worker=fresh.name, pid=fresh.pid, node=fresh.node)
    ctx.observer.state(fresh.name, "sync")
    ctx.table.join(fresh.name)
    await ctx.weights.welcome(fresh)
    return fresh


async def score(ctx: Context, group: list[Ticket], free: asyncio.Queue[int]) -> None:
    """One call for the whole group, on the next free reward worker, retried with back-off."""
    config = ctx.config.reward
    images = [ticket.payload[0] for ticket in group]
    for attempt in range(config.retries + 1):
        index = await free.get()
        try:
            scores = await score_once(ctx, index, group, images)
            break
        except (WorkerDied, WorkerFailed, DeadlineExceeded) as error:
            await reward_failed(ctx, index, error)
            if attempt == config.retries:
                if config.on_error == "fail":
                    raise
                ctx.observer.event("skipped", step=group[0].step, group=group[0].group, message=str(error))
                scores = None
        finally:
            free.put_nowait(index)
        await asyncio.sleep(config.backoff * 2**attempt)
    ctx.table.scored(group, scores)
    ctx.ready.notify()


async def score_once(ctx: Context, index: int, group: list[Ticket], images: list[object]) -> Scores:
    worker = ctx.reward.workers[index]
    ctx.observer.state(worker.name, "busy")
    async with deadline(ctx.config.deadlines.score, f"score: {describe(group[0])} on {worker.name}"):
        scores: Scores = await worker.call("score", ctx.recipe.prompt(group[0]), *images)
    for span in scores.spans:
        ctx.observer.event("span", worker=worker.name, name=span.name, start=span.start, end=span.end)
    ctx.observer.state(worker.name, "wait_data")
    return scores


async def reward_failed(ctx: Context, index: int, error: Exception) -> None:
    worker = ctx.reward.workers[index]
    ctx.observer.event("fault", worker=worker.name, kind=type(error).__name__, message=str(error))
    if not isinstance(error, WorkerFailed):
        worker.kill()
        await ctx.reward.replace(index)
