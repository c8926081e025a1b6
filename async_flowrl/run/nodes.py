"""Checks of a run on several nodes, before any model is loaded: `look_at_nodes` prints which workers are on which node.

It also checks that the nodes see the run directory. run/launch.py calls it.
"""

import logging
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

from async_flowrl.config.check import ConfigError
from async_flowrl.config.pools import TRAINER
from async_flowrl.config.schema import Config
from async_flowrl.observability.terminal import named_lines, say
from separation.group import Worker, WorkerGroup
from separation.supervise import deadline, together

logger = logging.getLogger(__name__)

OUR_CODE = ("async_flowrl", "separation", "checkpoint_engine")
"""Packages whose code must be the same on every node."""
LABEL_CHARACTERS = 10
"""Width of the label before each line, in characters."""


async def look_at_nodes(config: Config, groups: Mapping[str, WorkerGroup], folder: Path) -> None:
    """Prints the workers of each node, if there are several nodes. Does nothing without a cluster (`runtime.address`).

    `folder` is the run directory. Raises ConfigError if a node with trainer ranks does not see it.
    """
    if config.runtime.address is None:
        return
    table = seats(groups)
    if len(table) > 1:
        for address, workers in table.items():
            logger.info("node %s: %s", address, workers)
        if config.console != "quiet":
            rows = [("" if index else "nodes", f"{node}: {names}") for index, (node, names) in enumerate(table.items())]
            say(named_lines(rows, LABEL_CHARACTERS))
    await check_run_directory(config, groups, folder)


def seats(groups: Mapping[str, WorkerGroup]) -> dict[str, str]:
    """Returns node → its workers as text, e.g. `trainer-0…7, rollout-3`, in the order in which the pools name nodes."""
    by_node: dict[str, dict[str, list[int]]] = {}
    for name, group in groups.items():
        for worker in group.workers:
            by_node.setdefault(worker.node, {}).setdefault(name, []).append(worker.index)
    return {
        node: ", ".join(f"{pool}-{run}" for pool, indices in pools.items() for run in runs(sorted(indices)))
        for node, pools in by_node.items()
    }


def runs(numbers: list[int]) -> list[str]:
    """Returns sorted numbers as texts, where consecutive numbers become `first…last`."""
    # Consecutive numbers have the same distance from their places.
    spans = [[n for _, n in span] for _, span in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return [f"{span[0]}" if len(span) == 1 else f"{span[0]}…{span[-1]}" for span in spans]


async def check_run_directory(config: Config, groups: Mapping[str, WorkerGroup], folder: Path) -> None:
    """Writes a file into the run directory and has one worker of every node look for it.

    Raises ConfigError if a node with trainer ranks does not see it, because they write and read checkpoints there.
    Other workers write only their logs there, so for their nodes a warning is logged.
    """
    one_each: dict[str, tuple[Worker, str]] = {}
    for group in sorted(groups.values(), key=lambda group: group.spec.name != TRAINER):
        for worker in group.workers:
            one_each.setdefault(worker.node, (worker, "control" if "control" in group.spec.lanes else "main"))
    with marked(folder) as (path, text):
        async with deadline(config.deadlines.load, "load: whether all nodes see the run directory"):
            sight = "separation.node_checks:sees"
            calls = (worker.call(sight, path, text, lane=lane) for worker, lane in one_each.values())
            seen = await together(*calls)
    blind = [worker for (worker, _), sees in zip(one_each.values(), seen, strict=True) if not sees]
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
