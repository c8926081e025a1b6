"""A rollout worker's way into the run: its model, the same base weights as the trainer's, and proven live weights."""

import asyncio

from async_flowrl.controller.context import Context
from async_flowrl.controller.download import download_model, loaders, model_of
from separation.group import Worker
from separation.supervise import deadline


class StartError(RuntimeError):
    """A worker came up, but it does not fit the others."""


async def admit(ctx: Context, worker: Worker, *, newcomer: bool = False) -> None:
    """Brings a worker that was just built to where the gate gives it tickets. Raises StartError and what `load`,
    downloads and the proof of its weights raise. One that is cancelled leaves no worker behind: what goes on after
    the death of a trainer rank would take it for one whose base weights were compared. `newcomer`: it takes nobody's
    place, and its event says so."""
    ctx.observer.event("worker", worker=worker.name, pid=worker.pid, node=worker.node, newcomer=newcomer)
    try:
        await download_model(model_of(ctx.rollout), loaders([worker]), seconds=ctx.config.deadlines.download)
        check_base(worker, await load_rollout(worker, seconds=ctx.config.deadlines.load), ctx.base_digest)
        ctx.observer.state(worker.name, "sync")
        ctx.table.join(worker.name)
        await ctx.weights.welcome(worker)
    except asyncio.CancelledError:
        worker.kill()
        raise


async def load_rollout(worker: Worker, *, seconds: float) -> str:
    """Builds the worker's model; returns the digest of its base weights."""
    async with deadline(seconds, f"load: model of {worker.name}"):
        loaded = await worker.call("load")
    return str(loaded["base_digest"])


def check_base(worker: Worker, digest: str, expected: str) -> None:
    """Raises StartError unless the worker's base weights are those that the run began with, the trainer's."""
    if digest != expected:
        raise StartError(
            f"{worker.name} holds other base weights ({digest}) than the run began with ({expected}): model.path or "
            "its revision differs between nodes, or its files have changed"
        )
