"""The controller's side of `placement=shared`: options of deliveries, the tickets under way, and deadlines of calls.

`OwnVersions` (endpoints.py) describes how a worker takes a version that it has made itself.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

from async_flowrl.config.schema import SHARED, Config
from async_flowrl.controller.context import TICKETS_PER_WORKER, Context
from async_flowrl.types import POLICY
from checkpoint_engine import DeliveryOptions
from separation.group import Worker, seated
from separation.supervise import DeadlineExceeded, deadline, supervised

UNLIMITED_FAN_OUT = 1 << 30
"""Number of receivers that the sender serves itself, larger than any pool: no receiver passes a version on."""


def delivery_options(config: Config, stream: str) -> DeliveryOptions:
    """Returns the options with which the versions of `stream` are delivered to the rollout workers, or announced."""
    options = DeliveryOptions(
        retries=config.checkpoint_engine.retries, deadline=config.deadlines.publish, retain=config.live_versions
    )
    announced = config.placement == SHARED and stream == POLICY
    return replace(options, max_fan_out=UNLIMITED_FAN_OUT, node_fan_out=UNLIMITED_FAN_OUT) if announced else options


def occupy(ctx: Context, ranks: Iterable[int], *, trains: bool) -> None:
    """Records that these trainer ranks have work (`trains`) or have none; does nothing unless `placement=shared`.

    A process without training work can make tickets again, so its rollout worker is notified.
    """
    if ctx.config.placement != SHARED:
        return
    for rank in ranks:
        if trains:
            ctx.training.add(rank)
        elif rank in ctx.training:
            ctx.training.remove(rank)
            ctx.work.notify(seated(ctx.rollout, rank).name)


@asynccontextmanager
async def ticket_deadline(ctx: Context, worker: Worker, tickets: int, what: str) -> AsyncIterator[None]:
    """Raises DeadlineExceeded if the body, which waits for so many `tickets` of the worker, takes too long.

    With `placement=shared`, the time in which the worker's process trains does not count. `what` names the call in the
    error.
    """
    config = ctx.config
    async with deadline(generate_seconds(config, tickets), what):
        if config.placement != SHARED:
            yield
            return
        async with supervised(_hung(worker, config.deadlines.generate * tickets, what)):
            yield


async def _hung(worker: Worker, seconds: float, what: str) -> None:
    """Asks the worker every `seconds` for how long it has computed its present ticket; runs until it is cancelled.

    Raises DeadlineExceeded if that is longer than `seconds`, or if the worker does not answer within `seconds`.
    """
    while True:
        await asyncio.sleep(seconds)
        async with deadline(seconds, f"{what}: {worker.name}'s answer how long it has been at that"):
            at_work: float = await worker.call("seconds_at_work", lane="control")
        if at_work > seconds:
            raise DeadlineExceeded(what, seconds)


def generate_seconds(config: Config, tickets: int) -> float:
    """Returns the seconds that a worker may take for so many tickets.

    With `placement=shared`, the tickets may have to wait for a whole training step, and after it for one more call to
    train. If that call hangs, its own deadline must pass before this one, so that the error names the call that hangs
    and not the ticket that waits for it.
    """
    alone = config.deadlines.generate * tickets
    if config.placement != SHARED:
        return alone
    return alone + 2 * update_seconds(config, config.prompts_per_step + 1)


def update_seconds(config: Config, calls: int) -> float:
    """Returns the seconds that a trainer rank may take for so many calls; a call trains a group or ends a step.

    With `placement=shared`, these calls may have to wait for the ticket that the process is making. If that ticket
    hangs, `_hung` finds it within two times `deadlines.generate` per ticket of the worker, which has at most
    TICKETS_PER_WORKER batches of tickets. This deadline is longer, so that the error names the ticket that hangs and
    not the call that waits for it.
    """
    alone = config.deadlines.update * calls
    if config.placement != SHARED:
        return alone
    return alone + (2 * TICKETS_PER_WORKER + 1) * config.deadlines.generate * config.rollout.tickets_per_batch
