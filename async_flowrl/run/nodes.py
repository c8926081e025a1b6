"""Checks of a run on several nodes before any model is loaded: who is where, who sees the run directory, and memory."""

import logging
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from async_flowrl.config.check import ConfigError
from async_flowrl.config.schema import Config
from async_flowrl.config.scoring_pools import ROLLOUT, TRAINER
from async_flowrl.memory.host import NodeProcesses, check_disk, check_hosts
from async_flowrl.memory.model_sizes import stored_sizes
from async_flowrl.observability.terminal import named_lines, say
from async_flowrl.policies.registry import DTYPES
from async_flowrl.run.prepare import Prepared
from separation.group import PoolSpec, Worker, WorkerFailed, WorkerGroup
from separation.node import NodeMemory
from separation.supervise import deadline, together

logger = logging.getLogger(__name__)

OUR_CODE = ("async_flowrl", "separation", "checkpoint_engine")  # Packages whose code must be the same on every node.
# Packages whose versions affect results bit for bit, or the communication between nodes.
LIBRARIES = ("torch", "ray", "diffusers", "transformers", "peft", "numpy")
LABEL_CHARACTERS = 10  # Width of the label before each line, in characters.


async def look_at_nodes(config: Config, groups: Mapping[str, WorkerGroup], folder: Path) -> None:
    if config.runtime.address is None:
        return
    by_node: dict[str, Counter[str]] = {}
    for name, group in groups.items():
        for worker in group.workers:
            by_node.setdefault(worker.node, Counter())[name] += 1
    if len(by_node) > 1:
        names = [", ".join(f"{count} × {pool}" for pool, count in pools.items()) for pools in by_node.values()]
        table = [f"{node}: {workers}" for node, workers in zip(by_node, names, strict=True)]
        for line in table:
            logger.info("node %s", line)
        if config.console != "quiet":
            rows = [("" if index else "nodes", line) for index, line in enumerate(table)]
            say(named_lines(rows, LABEL_CHARACTERS))
    await compare_nodes(config, groups, folder)


async def compare_nodes(config: Config, groups: Mapping[str, WorkerGroup], folder: Path) -> None:
    """Has one worker of every node look for a file in the run directory. ConfigError if a rank does not see it.

    Libraries that differ between the nodes are a warning.
    """
    # Trainer ranks write and read checkpoints there, other workers only their logs.
    one_each: dict[str, tuple[Worker, str]] = {}
    for group in sorted(groups.values(), key=lambda group: group.spec.name != TRAINER):
        for worker in group.workers:
            one_each.setdefault(worker.node, (worker, quick_lane(group.spec)))
    asked = [*one_each.values()]
    with marked(folder) as (path, text):
        async with deadline(config.deadlines.load, "load: whether all nodes see the run directory"):
            answers = await together(*(worker.call(SIGHT, path, text, lane=lane) for worker, lane in asked))
            versions = await together(*(worker.call(VERSIONS, LIBRARIES, lane=lane) for worker, lane in asked))
    for name in LIBRARIES:
        found = {node: there[name] for node, there in zip(one_each, versions, strict=True)}
        if len(set(found.values())) > 1:
            where = ", ".join(f"{version} on {node}" for node, version in found.items())
            logger.warning("%s differs between nodes, and so may weights: %s", name, where)
    blind = [worker for (worker, _), sees in zip(asked, answers, strict=True) if not sees]
    for worker in blind:
        if worker.pool == TRAINER:
            raise ConfigError(
                f"output_dir={folder} is not shared: {worker.name} on node {worker.node} does not see what is written "
                "there on this node, and trainer ranks write checkpoints there and read them; choose a folder on a "
                "file system that all nodes mount"
            )
    if blind:
        nodes = ", ".join(worker.node for worker in blind)
        logger.warning("%s is not shared with node %s: the logs of its workers stay there", folder, nodes)


@contextmanager
def marked(folder: Path) -> Iterator[tuple[str, str]]:
    """Writes a file with a random text into the folder, yields its path and text, and removes it after the block."""
    mark, text = folder.absolute() / f".seen-{secrets.token_hex(4)}", secrets.token_hex(16)
    mark.write_text(text)
    try:
        yield str(mark), text
    finally:
        mark.unlink(missing_ok=True)


# Functions that workers run: on a file, on versions, on the elements of the model's files, on the memory of their node.
SIGHT, VERSIONS = "separation.node:sees", "separation.node:versions_of"
ELEMENTS, MEMORY = "async_flowrl.policies.stored:stored_elements", "separation.node:node_memory"
LOOK_SECONDS = 20.0  # Time after which a run goes on without the check; the answers take milliseconds.
# Lanes on which no call takes long; `main` of a reward server is taken while the server starts.
QUICK_LANES = ("control", "stop")


async def check_memory(
    prepared: Prepared, groups: Mapping[str, WorkerGroup], devices: Mapping[str, int], folder: Path
) -> None:
    """Compares the nodes' memory, and the disk of the run directory `folder`, with the plan.

    Raises ConfigError if a node is too small. Any other failure becomes a warning, because the run may still succeed.
    """
    # A worker that is dead or hangs is not dealt with here: the next call to it does that.
    config, model, reader = prepared.config, prepared.model, groups[ROLLOUT].workers[0]
    if model.random:  # Nothing is read from files.
        return
    try:
        async with deadline(LOOK_SECONDS, "looking at the memory of the nodes"):
            answers: list[Any] = await together(reader.call(ELEMENTS, model.path, model.revision), look_at(groups))
        sizes = stored_sizes(config, answers[0], DTYPES[model.dtype].itemsize)
        for sentence in (*check_hosts(config, sizes, answers[1], devices), *check_disk(config, sizes, folder)):
            logger.warning("%s", sentence)
    except ConfigError:
        raise
    except Exception as error:
        why = error.message if isinstance(error, WorkerFailed) else f"{type(error).__name__}: {error}"
        logger.warning("the nodes' memory is not compared with a plan: %s", why)


async def look_at(groups: Mapping[str, WorkerGroup]) -> list[NodeProcesses]:
    """Returns the nodes of all workers, each with its memory as the first of its workers sees it."""
    # Workers are on one node if they have one address, one host name and the same control groups.
    calls = [
        (worker, quick_lane(group.spec))
        for _, group in sorted(groups.items(), key=lambda item: item[0] != TRAINER)
        for worker in group.workers
    ]
    answers: list[NodeMemory] = await together(*(worker.call(MEMORY, lane=lane) for worker, lane in calls))
    nodes: dict[tuple[str, str, str], NodeProcesses] = {}
    for (worker, _), report in zip(calls, answers, strict=True):
        node = nodes.setdefault((worker.node, report.host, report.place), NodeProcesses(worker.node, report, {}))
        node.workers.setdefault(worker.pool, []).append(worker.index)
    return [*nodes.values()]


def quick_lane(spec: PoolSpec) -> str:
    return next((lane for lane in QUICK_LANES if lane in spec.lanes), "main")
