"""The rollout pool's size while a run goes on: workers join when nodes bring seats, and leave when nodes are drained.

None of it shows in the weights: a ticket is a function of its ordinal and its version, whoever makes it.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from async_flowrl.controller.admission import StartError, admit
from async_flowrl.controller.context import Context
from separation.group import Growth, Worker, WorkerDied, WorkerFailed
from separation.node_checks import OtherCode
from separation.supervise import DeadlineExceeded

logger = logging.getLogger(__name__)

TURNED_AWAY = (WorkerDied, WorkerFailed, DeadlineExceeded, StartError, OtherCode)
"""What a newcomer may fail with: it is turned away, and the run goes on without it."""
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 300.0
"""Before a seat is tried again after a newcomer that was turned away; doubled each time, up to the longest."""


class PoolTooSmall(RuntimeError):
    """The rollout pool has had fewer workers than it may have for too long."""


async def change_size(ctx: Context, growth: Growth, serve: Callable[[int], None]) -> None:
    """Runs until it is cancelled. `serve(index)` starts to give a worker tickets. Raises PoolTooSmall."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(grow(ctx, growth, serve, tasks), name="growth of the rollout pool")
        tasks.create_task(shrink(ctx, growth), name="drained nodes")
        tasks.create_task(watch_size(ctx), name="workers that the rollout pool must have")


async def grow(ctx: Context, growth: Growth, serve: Callable[[int], None], tasks: asyncio.TaskGroup) -> None:
    """A worker for every seat that comes, all side by side. A seat whose worker cannot serve is kept for a pause."""
    failures, arrivals = 0, ctx.arrivals
    unfilled: list[Any] = []

    def pause() -> float:
        return min(LONGEST_PAUSE_SECONDS, PAUSE_SECONDS * 2.0 ** (failures - 1))

    async def fill(seat: Any) -> Worker | None:
        nonlocal failures
        arrivals.starting += 1
        try:
            worker = await growth.fill(seat)
        except TURNED_AWAY as error:
            failures += 1
            refuse(ctx, "a new rollout worker", error)
        else:
            unfilled.remove(seat)
            return worker
        finally:
            arrivals.starting -= 1
        await asyncio.sleep(pause())
        unfilled.remove(seat)
        await growth.give_back(seat)
        return None

    async def bring_in(seat: Any) -> None:
        nonlocal failures
        if (worker := await fill(seat)) is None:
            return
        arrivals.under_way.add(worker.name)
        try:
            await admit(ctx, worker, newcomer=True)
        except TURNED_AWAY as error:
            failures += 1
            refuse(ctx, worker.name, error)
            arrivals.refused.add(worker.name)
            arrivals.under_way.discard(worker.name)
            await take_out(ctx, worker, keep_seat=pause())
            arrivals.refused.discard(worker.name)
            return
        failures = 0
        arrivals.under_way.discard(worker.name)
        ctx.observer.event("worker_joined", worker=worker.name, node=worker.node, workers=serving(ctx))
        logger.warning("%s on %s joined: %s", worker.name, worker.node, counted(ctx))
        serve(worker.index)

    try:
        while True:
            unfilled.append(seat := await growth.seat())
            tasks.create_task(bring_in(seat), name="arrival of a rollout worker")
    finally:
        for seat in unfilled:
            await growth.give_back(seat)


def refuse(ctx: Context, who: str, error: BaseException) -> None:
    logger.warning("%s cannot join the run: %s", who, error)
    ctx.observer.event("fault", worker=who, kind=type(error).__name__, message=str(error))


async def shrink(ctx: Context, growth: Growth) -> None:
    """Tells the workers of a drained node to leave: they get no more tickets."""
    while True:
        for departure in await growth.departures(ctx.departures.names):
            name = departure.worker.name
            ctx.departures.announce(name, departure.seconds)
            ctx.work.notify(name)


async def leave(ctx: Context, worker: Worker, reason: str) -> None:
    """A worker that has served leaves the run."""
    await take_out(ctx, worker)
    ctx.observer.event("worker_left", worker=worker.name, node=worker.node, reason=reason, workers=serving(ctx))
    logger.warning("%s on %s left (%s): %s", worker.name, worker.node, reason, counted(ctx))


async def take_out(ctx: Context, worker: Worker, *, keep_seat: float = 0.0) -> None:
    """Its unfinished tickets wait for another worker, and its seat is given back, after so many seconds."""
    ctx.table.hand_back(worker.name)
    await ctx.weights.leave(worker.name)
    ctx.work.notify()
    ctx.observer.state(worker.name, "gone")
    if ctx.rollout.growth is not None:
        if keep_seat:
            worker.kill()
            await asyncio.sleep(keep_seat)
        await ctx.rollout.growth.release(worker.index)


def serving(ctx: Context) -> int:
    """How many rollout workers serve, or are being replaced."""
    return sum(worker.name not in ctx.arrivals for worker in ctx.rollout.workers)


def counted(ctx: Context) -> str:
    here = serving(ctx)
    return f"{here} rollout worker{'' if here == 1 else 's'}"


async def watch_size(ctx: Context) -> None:
    """Raises PoolTooSmall when there have been fewer workers than `min_workers` for longer than a start may take, and
    none is on its way."""
    seconds, least = ctx.config.deadlines.load, ctx.rollout.spec.least
    clock = asyncio.get_running_loop().time
    enough = clock()
    while True:
        if serving(ctx) >= least:
            enough = clock()
        elif clock() - enough > seconds and not (ctx.arrivals.starting or ctx.arrivals.under_way):
            raise PoolTooSmall(
                f"{counted(ctx)} for {seconds:g} s, and rollout.min_workers={least}: go on with resume=auto when nodes "
                "are there, or with fewer"
            )
        await asyncio.sleep(min(1.0, seconds / 4))
