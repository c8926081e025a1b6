"""Admission of a rollout worker to the run: it loads its model, its base weights are compared, its live ones proven."""

import asyncio

from async_flowrl.controller.context import Context
from async_flowrl.controller.download import download_model, loaders, model_of
from separation.group import Worker
from separation.supervise import deadline


class StartError(RuntimeError):
    """Raised if a worker has started but holds other base weights than the others."""


async def admit(ctx: Context, worker: Worker, *, newcomer: bool = False) -> None:
    """Loads and checks a worker that was just built; afterwards the gate may give it tickets.

    `newcomer` means that it is an additional worker, not a replacement; the event `worker` records that. Raises
    StartError, and the errors of the download, of `load` and of the proof of its weights. If this call is cancelled,
    it kills the worker: otherwise a recovery after the death of a trainer rank would find the worker in the pool and
    assume that its base weights were compared.
    """
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
    """Has the worker build its model, within `seconds`; returns the digest of its base weights."""
    async with deadline(seconds, f"load: model of {worker.name}"):
        loaded = await worker.call("load")
    return str(loaded["base_digest"])


def check_base(worker: Worker, digest: str, expected: str) -> None:
    """Raises StartError if `digest`, of the worker's base weights, differs from `expected`, of the trainer's."""
    if digest != expected:
        raise StartError(
            f"{worker.name} holds other base weights ({digest}) than the run began with ({expected}): model.path or "
            "its revision differs between nodes, or its files have changed"
        )
