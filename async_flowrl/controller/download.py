"""Download of the model's files from the Hugging Face hub to every node, by one worker per node, before workers load.

Called when a run starts or goes back (run/hosts.py, run/recovery.py), and when a worker joins or is replaced
(admission.py).
"""

import logging
from collections.abc import Sequence

from async_flowrl.policies.registry import PARTS, ResolvedModel
from separation.group import Worker, WorkerGroup
from separation.supervise import deadline, together

logger = logging.getLogger(__name__)


def model_of(pool: WorkerGroup) -> ResolvedModel | None:
    """Returns the model that the workers of a pool load; None if they load none."""
    model: ResolvedModel | None = pool.spec.arguments.get("model")
    return model


def loaders(rollouts: Sequence[Worker] = (), trainers: Sequence[Worker] = ()) -> list[tuple[Worker, str]]:
    """Returns pairs of a worker and the part of the model that it loads (one of `PARTS` in policies/registry.py).

    Among the trainer ranks, only the first reads weights.
    """
    ranks = [(rank, "structure" if index else "transformer") for index, rank in enumerate(trainers)]
    return [*((worker, "all") for worker in rollouts), *ranks]


async def download_model(model: ResolvedModel | None, workers: Sequence[tuple[Worker, str]], *, seconds: float) -> None:
    """Downloads a hub model to every node of `workers`, which are pairs of a worker and the parts that it loads.

    On each node, the worker that loads most downloads for all. Does nothing for None and for a local folder. Raises
    DeadlineExceeded, which names the node, after `seconds`, and WorkerFailed with the hub's error.
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
        await worker.call("async_flowrl.config.hub:download", model.path, model.revision, parts)
