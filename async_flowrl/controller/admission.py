"""Admission of a rollout worker to the run: it loads its model, its base weights are compared, its live ones proven."""

import asyncio
import logging
from collections.abc import Sequence

from async_flowrl.controller.context import Context
from async_flowrl.policies.registry import PARTS, ResolvedModel
from separation.group import Worker, WorkerGroup
from separation.supervise import deadline, together


class StartError(RuntimeError):
    """Raised if a worker has started but holds other base weights than the others."""


async def admit(ctx: Context, worker: Worker, *, newcomer: bool = False) -> None:
    """Loads and checks a worker that was just built (an additional one: `newcomer`); the gate may then give it tickets.

    Raises StartError, and the errors of the download, of `load` and of the proof. If it is cancelled, it kills the
    worker: a recovery would otherwise find it in the pool and assume that its base weights were compared.
    """
    ctx.observer.event("worker", worker=worker.name, pid=worker.pid, node=worker.node, newcomer=newcomer)
    try:
        await download_model(model_of(ctx.rollout), loaders([worker]), seconds=ctx.config.deadlines.download)
        check_base(worker, await load_rollout(worker, seconds=ctx.config.deadlines.load), ctx.base_digest)
        ctx.observer.state(worker.name, "sync")
        ctx.table.join(worker.name)
        await ctx.weights.add_worker(worker)
    except asyncio.CancelledError:
        worker.kill()
        raise


async def load_rollout(worker: Worker, *, seconds: float) -> str:
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


logger = logging.getLogger(__name__)


def model_of(pool: WorkerGroup) -> ResolvedModel | None:
    model: ResolvedModel | None = pool.spec.arguments.get("model")
    return model


def loaders(rollouts: Sequence[Worker] = (), trainers: Sequence[Worker] = ()) -> list[tuple[Worker, str]]:
    """Returns (worker, part of the model that it loads: one of `PARTS`); only the first trainer rank reads weights."""
    ranks = [(rank, "structure" if index else "transformer") for index, rank in enumerate(trainers)]
    return [*((worker, "all") for worker in rollouts), *ranks]


async def download_model(model: ResolvedModel | None, workers: Sequence[tuple[Worker, str]], *, seconds: float) -> None:
    """Downloads a hub model to each node and quantises its base, by the worker of `workers` that loads most there.

    For None, and for local files that are not quantised, it does nothing. Raises DeadlineExceeded, which names the
    node, after `seconds` for each of both, and WorkerFailed with the hub's error.
    """
    if model is None or (model.revision is None and not model.keeps_copy):
        return
    chosen: dict[str, tuple[Worker, str]] = {}
    for worker, parts in sorted(workers, key=lambda pair: PARTS.index(pair[1])):
        chosen.setdefault(worker.node, (worker, parts))
    logger.info("files of %s: made ready by %s", model.path, ", ".join(worker.name for worker, _ in chosen.values()))
    await together(*(_download(model, worker, parts, seconds) for worker, parts in chosen.values()))


async def _download(model: ResolvedModel, worker: Worker, parts: str, seconds: float) -> None:
    if model.revision is not None:
        async with deadline(seconds, f"download: {model.path} to node {worker.node}, by {worker.name}"):
            await worker.call("async_flowrl.config.hub:download", model.path, model.revision, parts)
    if model.keeps_copy and parts != "structure":
        async with deadline(seconds, f"quantisation: {model.path} on node {worker.node}, by {worker.name}"):
            await worker.call("async_flowrl.policies.registry:keep_copy", model, parts)
