"""The size of an elastic rollout pool during a run: workers join when nodes bring seats, and leave drained nodes.

The size does not change the weights, because a ticket's images depend only on its ordinal and its version.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from async_flowrl.controller.admission import StartError, admit
from async_flowrl.controller.context import Context
from async_flowrl.controller.endpoints import SenderFailed, SenderLost
from separation.group import Growth, Worker, WorkerDied, WorkerFailed
from separation.node import OtherCode
from separation.supervise import DeadlineExceeded

logger = logging.getLogger(__name__)

# Errors of a new worker after which it is removed and the run goes on without it.
TURNED_AWAY = (WorkerDied, WorkerFailed, DeadlineExceeded, StartError, OtherCode)
# First and longest pause before a seat is tried again whose worker could not serve; the pause doubles each time.
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 300.0


class Pauses:
    """The pauses after failures. Failures that come together, e.g. of nodes that arrived together, count as one."""

    def __init__(self) -> None:
        self._last = self._counts_from = 0.0

    def after_failure(self) -> float:
        """Counts a failure and returns the pause after it in seconds."""
        now = asyncio.get_running_loop().time()
        if now >= self._counts_from:
            self._last = min(LONGEST_PAUSE_SECONDS, 2 * self._last or PAUSE_SECONDS)
            self._counts_from = now + self._last / 2
        return self._last

    def forget(self) -> None:
        self._last = self._counts_from = 0.0


class PoolTooSmall(RuntimeError):
    """Raised if the rollout pool has had fewer workers than `rollout.min_workers` for too long."""


async def change_size(ctx: Context, growth: Growth, serve: Callable[[int], None]) -> None:
    """Changes the pool's size until it is cancelled; `serve(index)` starts a worker. Raises PoolTooSmall in a group."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(grow(ctx, growth, serve, tasks), name="growth of the rollout pool")
        tasks.create_task(shrink(ctx, growth), name="drained nodes")
        tasks.create_task(watch_size(ctx), name="workers that the rollout pool must have")


async def grow(ctx: Context, growth: Growth, serve: Callable[[int], None], tasks: asyncio.TaskGroup) -> None:
    """Starts a worker for every seat that becomes free; the seat of one that cannot serve is kept for a pause."""
    pauses, unfilled = Pauses(), list[Any]()

    async def fill(seat: Any) -> Worker | None:
        """Builds the worker of the seat; if that fails, gives the seat back after a pause and returns None."""
        ctx.arriving += 1
        try:
            worker = await growth.fill(seat)
        except TURNED_AWAY as error:
            pause = pauses.after_failure()
            refuse(ctx, "a new rollout worker", error)
        else:
            unfilled.remove(seat)
            return worker
        finally:
            ctx.arriving -= 1
        await asyncio.sleep(pause)
        unfilled.remove(seat)
        await growth.give_back(seat)
        return None

    async def bring_in(seat: Any) -> None:
        """Builds the seat's worker and serves it, or takes it out. Raises SenderLost, SenderFailed, SenderLate."""
        if (worker := await fill(seat)) is None:
            return
        ctx.arriving += 1
        ctx.not_serving.add(worker.name)
        try:
            await admit(ctx, worker, newcomer=True)
        except (SenderLost, SenderFailed):  # Among the errors in TURNED_AWAY, but a trainer rank's death or failure.
            raise
        except TURNED_AWAY as error:
            refuse(ctx, worker.name, error)
            ctx.arriving -= 1
            await take_out(ctx, worker, keep_seat=pauses.after_failure())
            ctx.not_serving.discard(worker.name)
            return
        pauses.forget()
        ctx.arriving -= 1
        ctx.not_serving.discard(worker.name)
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
    while True:
        for name, seconds in (await growth.departures(ctx.draining.names)).items():
            ctx.draining.announce(name, seconds)
            ctx.work.notify(name)


async def leave(ctx: Context, worker: Worker, reason: str) -> None:
    await take_out(ctx, worker)
    ctx.observer.event("worker_left", worker=worker.name, node=worker.node, reason=reason, workers=serving(ctx))
    logger.warning("%s on %s left (%s): %s", worker.name, worker.node, reason, counted(ctx))


async def take_out(ctx: Context, worker: Worker, *, keep_seat: float = 0.0) -> None:
    """Kills a worker, hands back its tickets, and gives its seat back after `keep_seat` seconds."""
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
    return sum(worker.name not in ctx.not_serving for worker in ctx.rollout.workers)


def counted(ctx: Context) -> str:
    here = serving(ctx)
    return f"{here} rollout worker{'' if here == 1 else 's'}"


async def watch_size(ctx: Context) -> None:
    """Raises PoolTooSmall if the pool has fewer than `min_workers` for `deadlines.load` seconds and none is starting.

    It waits twice as long if a worker was starting: one that hangs until that deadline leaves time for another one.
    """
    seconds, least = ctx.config.deadlines.load, ctx.rollout.spec.least
    clock = asyncio.get_running_loop().time
    enough, tried = clock(), False
    while True:
        limit = 2 * seconds if tried else seconds
        if serving(ctx) >= least:
            enough, tried = clock(), False
        elif ctx.arriving:
            tried = True
        elif clock() - enough > limit:
            raise PoolTooSmall(
                f"{counted(ctx)} for {limit:g} s, and rollout.min_workers={least}: go on with resume=auto when nodes "
                "are there, or with fewer"
            )
        await asyncio.sleep(min(1.0, seconds / 4))
