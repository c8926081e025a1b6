"""Check of the nodes' host memory before models are loaded; run/job.py calls `ready_nodes`.

The plan (memory/host.py) says what the processes need, each node says what it has, and one worker counts the
elements of the model's files by their headers. Where any of that fails, the run goes on without the check.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from async_flowrl.config.pools import ROLLOUT, TRAINER
from async_flowrl.controller.admission import download_model, loaders, model_of
from async_flowrl.memory.host import Hosts, NodeProcesses, check_hosts
from async_flowrl.run.prepare import Prepared
from separation.group import PoolSpec, WorkerFailed, WorkerGroup
from separation.node_memory import NodeMemory
from separation.supervise import deadline, together

logger = logging.getLogger(__name__)

ELEMENTS, MEMORY = "async_flowrl.policies.stored:stored_elements", "separation.node_memory:node_memory"
"""Functions that workers run: the elements of the model's files, and the memory of their node."""
LOOK_SECONDS = 20.0
"""Time after which a run goes on without the check; the answers take milliseconds."""
QUICK_LANES = ("control", "stop")
"""Lanes on which no call takes long; `main` of a reward server is taken while the server starts."""


async def ready_nodes(prepared: Prepared, groups: Mapping[str, WorkerGroup], devices: Mapping[str, int]) -> None:
    """Downloads the model's files to every node whose workers load them, and compares the nodes' memory with the plan.

    A node with too little free memory is a warning in the log. `devices` is that of Hosts. Nothing is compared if the
    model has no safetensors files, or if a worker does not answer. Raises ConfigError if a node is too small,
    and the errors of the download.
    """
    everyone = loaders(groups[ROLLOUT].workers, groups[TRAINER].workers)
    await download_model(model_of(groups[ROLLOUT]), everyone, seconds=prepared.config.deadlines.download)
    if (hosts := await look(prepared, groups, devices)) is None:
        return
    for sentence in await asyncio.to_thread(check_hosts, prepared.config, hosts):
        logger.warning("%s", sentence)


async def look(prepared: Prepared, groups: Mapping[str, WorkerGroup], devices: Mapping[str, int]) -> Hosts | None:
    """Returns the nodes and the elements of the model's files, or None, with a line in the log, if that fails.

    A worker that is dead or hangs is not dealt with here: the next call to it does that.
    """
    model, reader = prepared.model, groups[ROLLOUT].workers[0]
    if model.random:  # Nothing is read from files.
        return None
    try:
        async with deadline(LOOK_SECONDS, "looking at the memory of the nodes"):
            answers: list[Any] = await together(reader.call(ELEMENTS, model.path, model.revision), look_at(groups))
    except Exception as error:
        why = error.message if isinstance(error, WorkerFailed) else f"{type(error).__name__}: {error}"
        logger.info("the nodes' memory is not compared with a plan: %s", why, exc_info=True)
        return None
    stored, nodes = answers
    return Hosts(nodes, stored, devices)


async def look_at(groups: Mapping[str, WorkerGroup]) -> tuple[NodeProcesses, ...]:
    """Returns the nodes of all workers, each with its memory as the first of its workers sees it.

    Workers are on one node if they have one address, one host name and the same control groups.
    """
    asked = [
        (name, worker, quick_lane(group.spec))
        for name, group in sorted(groups.items(), key=lambda item: item[0] != TRAINER)
        for worker in group.workers
    ]
    answers: list[NodeMemory] = await together(*(worker.call(MEMORY, lane=lane) for _, worker, lane in asked))
    memory: dict[tuple[str, str, str], NodeMemory] = {}
    there: dict[tuple[str, str, str], dict[str, list[int]]] = {}
    for (name, worker, _), seen in zip(asked, answers, strict=True):
        node = worker.node, seen.host, seen.place
        memory.setdefault(node, seen)
        there.setdefault(node, {}).setdefault(name, []).append(worker.index)
    return tuple(
        NodeProcesses(node[0], memory[node], {name: tuple(of) for name, of in pools.items()})
        for node, pools in there.items()
    )


def quick_lane(spec: PoolSpec) -> str:
    """Returns a lane of the pool's workers on which an answer comes soon."""
    return next((lane for lane in QUICK_LANES if lane in spec.lanes), "main")
