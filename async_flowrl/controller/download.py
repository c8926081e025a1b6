"""The model's files on every node, fetched by one of its workers before any of them loads."""

import logging
from collections.abc import Sequence

from async_flowrl.policies.registry import PARTS, ResolvedModel
from separation.group import Worker, WorkerGroup
from separation.supervise import deadline, together

logger = logging.getLogger(__name__)


def model_of(pool: WorkerGroup) -> ResolvedModel | None:
    """The model that the workers of a pool were given to load; None where they were given none."""
    model: ResolvedModel | None = pool.spec.arguments.get("model")
    return model


def loaders(rollouts: Sequence[Worker] = (), trainers: Sequence[Worker] = ()) -> list[tuple[Worker, str]]:
    """Workers with the parts of the model that each loads: of the trainer ranks, only the first reads weights."""
    ranks = [(rank, "structure" if index else "transformer") for index, rank in enumerate(trainers)]
    return [*((worker, "all") for worker in rollouts), *ranks]


async def download_model(model: ResolvedModel | None, workers: Sequence[tuple[Worker, str]], *, seconds: float) -> None:
    """Brings a hub model's files to every node of `workers`, each with the parts that it loads; one worker per node.

    Nothing to do for a local folder. Raises DeadlineExceeded, which names the node, and WorkerFailed with what the hub
    said.
    """
    if model is None or model.revision is None:
        return
    chosen: dict[str, tuple[Worker, str]] = {}
    for worker, parts in sorted(workers, key=lambda pair: PARTS.index(pair[1])):
        chosen.setdefault(worker.node, (worker, parts))
    logger.info("files of %s: fetched by %s", model.path, ", ".join(worker.name for worker, _ in chosen.values()))
    await together(*(_download(model, worker, parts, seconds) for worker, parts in chosen.values()))


async def _download(model: ResolvedModel, worker: Worker, parts: str, seconds: float) -> None:
    async with deadline(seconds, f"download: {model.path} to node {worker.node}, by {worker.name}"):
        await worker.call("async_flowrl.policies.download:download", model.path, model.revision, parts)
