"""The controller's side of `placement=shared`: how versions are announced, and how long calls may take.

How a worker takes a version that it has made itself is in own_versions.py.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

from async_flowrl.config.schema import Config
from async_flowrl.config.shared import SHARED
from async_flowrl.controller.context import TICKETS_PER_WORKER, Context
from async_flowrl.types import POLICY
from checkpoint_engine import DeliveryOptions
from separation.group import Worker, seated
from separation.supervise import DeadlineExceeded, deadline, supervised

EVERYONE = 1 << 30
"""Receivers that a sender serves where nothing is sent: nobody passes anything on."""


def delivery_options(config: Config, stream: str, *, sharded: bool = False) -> DeliveryOptions:
    """How the versions of a stream are brought to the workers, or announced; `sharded`: in buckets of each rank."""
    options = DeliveryOptions(
        retries=config.checkpoint_engine.retries, deadline=config.deadlines.publish, retain=config.live_versions
    )
    announced = config.placement == SHARED and stream == POLICY
    direct = announced or sharded
    return replace(options, max_fan_out=EVERYONE, node_fan_out=EVERYONE) if direct else options


def occupy(ctx: Context, ranks: Iterable[int], *, trains: bool) -> None:
    """Notes which of the workers that sample, too, have something to train; those that have not may want tickets."""
    if ctx.config.placement != SHARED:
        return
    for rank in ranks:
        if trains:
            ctx.training.add(rank)
        elif rank in ctx.training:
            ctx.training.remove(rank)
            ctx.work.notify(seated(ctx.rollout, rank).name)


@asynccontextmanager
async def ticket_deadline(config: Config, worker: Worker, tickets: int, what: str) -> AsyncIterator[None]:
    """Raises DeadlineExceeded if the worker's tickets take too long, without what is trained before them."""
    async with deadline(generate_seconds(config, tickets), what):
        if config.placement != SHARED:
            yield
            return
        async with supervised(_hung(worker, config.deadlines.generate * tickets, what)):
            yield


async def _hung(worker: Worker, seconds: float, what: str) -> None:
    """Runs until it is cancelled. Asks the worker, which trains, too, how long the ticket under way has computed."""
    while True:
        await asyncio.sleep(seconds)
        async with deadline(seconds, f"{what}: {worker.name}'s answer how long it has been at that"):
            at_work: float = await worker.call("seconds_at_work", lane="control")
        if at_work > seconds:
            raise DeadlineExceeded(what, seconds)


def generate_seconds(config: Config, tickets: int) -> float:
    """That a worker may take for so many tickets.

    Of a worker that trains, too, a step may come between, and one more call to train, which hangs: that call's own
    deadline is to come first, so that it is named and not the ticket that waits for it.
    """
    alone = config.deadlines.generate * tickets
    if config.placement != SHARED:
        return alone
    return alone + 2 * update_seconds(config, config.prompts_per_step + 1)


def update_seconds(config: Config, calls: int) -> float:
    """That a trainer rank may take for so many calls, each of one group, or the end of an optimizer step.

    In a worker that samples, too, they may wait for the ticket under way. `_hung` finds one that hangs within twice
    `deadlines.generate` for each of the worker's tickets, at most TICKETS_PER_WORKER batches: before what waits for it.
    """
    alone = config.deadlines.update * calls
    if config.placement != SHARED:
        return alone
    return alone + (2 * TICKETS_PER_WORKER + 1) * config.deadlines.generate * config.rollout.tickets_per_batch
