"""Check of the nodes' host memory before models are loaded; run/job.py calls `ready_nodes`.

The plan (Tools.check_hosts) says what the processes need, each node says what it has, and one worker counts the
elements of the model's files by their headers.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from async_flowrl.config.pool_names import ROLLOUT, TRAINER
from async_flowrl.config.schema import Config
from async_flowrl.controller.download import download_model, loaders, model_of
from async_flowrl.policies.stored import StoredElements
from async_flowrl.run.prepare import Prepared
from separation.group import Worker, WorkerFailed, WorkerGroup
from separation.node_memory import NodeMemory
from separation.supervise import deadline, together

logger = logging.getLogger(__name__)

ELEMENTS, MEMORY = "async_flowrl.policies.stored:stored_elements", "separation.node_memory:node_memory"
"""Functions that workers run: the elements of the model's files, and the memory of their node."""


@dataclass(frozen=True)
class NodeProcesses:
    """A node and the processes of the run on it."""

    address: str
    memory: NodeMemory
    workers: Mapping[str, tuple[int, ...]]
    """Pool → indices of its workers there."""
    controller: bool
    """True if the process that started the run is there."""


@dataclass(frozen=True)
class Hosts:
    """All nodes of a run, and the model that its workers load."""

    nodes: tuple[NodeProcesses, ...]
    stored: StoredElements
    on_gpus: bool
    """True if trainer ranks or rollout workers have GPUs."""


CheckHosts = Callable[[Config, Hosts], Sequence[str]]
"""Compares the planned host memory with the nodes. Returns warnings or raises ConfigError."""


async def ready_nodes(
    prepared: Prepared, groups: Mapping[str, WorkerGroup], check: CheckHosts | None, *, on_gpus: bool
) -> None:
    """Downloads the model's files to every node whose workers load them, and compares the nodes' memory by `check`.

    The sentences of `check` are logged as warnings. A model without safetensors files is not compared, and nothing if
    `check` is None. Raises ConfigError if a node is too small, and the errors of the download.
    """
    config, model, reader = prepared.config, prepared.model, groups[ROLLOUT].workers[0]
    everyone = loaders(groups[ROLLOUT].workers, groups[TRAINER].workers)
    await download_model(model_of(groups[ROLLOUT]), everyone, seconds=config.deadlines.download)
    if check is None:
        return
    async with deadline(config.deadlines.load, "load: memory of the nodes"):
        try:
            stored: StoredElements = await reader.call(ELEMENTS, model.path, model.revision)
        except WorkerFailed as error:
            logger.info("the nodes' memory is not compared with a plan: %s", error.message)
            return
        nodes = await look_at(groups)
    for sentence in await asyncio.to_thread(check, config, Hosts(nodes, stored, on_gpus)):
        logger.warning("%s", sentence)


async def look_at(groups: Mapping[str, WorkerGroup]) -> tuple[NodeProcesses, ...]:
    """Returns the nodes of all workers, each with its memory as one worker there sees it."""
    there: dict[str, dict[str, list[int]]] = {}
    asked: dict[str, tuple[Worker, str]] = {}
    for name, group in sorted(groups.items(), key=lambda item: item[0] != TRAINER):
        for worker in group.workers:
            there.setdefault(worker.node, {}).setdefault(name, []).append(worker.index)
            asked.setdefault(worker.node, (worker, "control" if "control" in group.spec.lanes else "main"))
    answers: list[NodeMemory] = await together(*(worker.call(MEMORY, lane=lane) for worker, lane in asked.values()))
    memory = dict(zip(asked, answers, strict=True))
    here = next((node for node in asked if memory[node].host == socket.gethostname()), None)
    return tuple(
        NodeProcesses(node, memory[node], {name: tuple(of) for name, of in pools.items()}, controller=node == here)
        for node, pools in there.items()
    )
