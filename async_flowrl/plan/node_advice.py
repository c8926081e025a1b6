"""Settings that lower the host memory of a node's processes, for the messages of node_memory.py."""

from collections.abc import Iterator
from dataclasses import replace

from async_flowrl.config.elastic import elastic
from async_flowrl.config.pool_names import ROLLOUT, TRAINER
from async_flowrl.config.schema import Config
from async_flowrl.config.sections.tune import FULL
from async_flowrl.config.shared import SHARED
from async_flowrl.plan.changes import Change, fresh_images
from async_flowrl.plan.host_memory import in_shares
from async_flowrl.plan.host_needs import PROCESS_BYTES
from async_flowrl.plan.memory import Footprint, in_one, rollout_footprint, trainer_footprint
from async_flowrl.plan.node_needs import gib, is_short, on_gpus, processes_on, sizes_of, total_need
from async_flowrl.run.hosts import Hosts, NodeProcesses

MAX_SETTINGS_SHOWN = 3
"""Most settings that a message names."""
WORKERS = "rollout.num_workers"


def advice(config: Config, hosts: Hosts, node: NodeProcesses) -> str:
    """Returns a clause with up to three settings that make the processes fit the node, or come nearest to it.

    Settings that cost least speed or accuracy come first, and last those that need more of a GPU instead; each is named
    with the GiB that would then be needed.
    """
    limit = min(node.memory.total, node.memory.free + processes_on(config, node) * PROCESS_BYTES)
    now, after = total_need(config, hosts, node), dict[Change, int]()
    for change in smaller(config, hosts, node):
        if change.accepted(config):
            needed = total_need(change.applied(config), hosts, _after(change, node))
            if needed < now:
                after[change] = needed
    fitting = [change for change in after if after[change] <= limit]
    chosen = fitting or sorted(after, key=lambda change: after[change])
    listed = ", ".join(f"{change} ({gib(after[change])} GiB)" for change in chosen[:MAX_SETTINGS_SHOWN])
    if not listed:
        return "no single setting would make it less"
    return f"{'it would fit' if fitting else 'it would be less, though not little enough,'} with {listed}"


def smaller(config: Config, hosts: Hosts, node: NodeProcesses) -> Iterator[Change]:
    """Yields settings that may lower the host memory of a node's processes, in the order of `advice`."""
    trainer = config.trainer
    if config.tune == FULL and trainer.num_workers > 1 and not in_shares(config):
        yield Change("trainer.shard", "full")
    if config.model.dtype == "float32":
        yield Change("model.dtype", "bfloat16")
    if config.max_staleness > 0:
        yield fresh_images(config)
    if trainer.ema_decay is not None:
        yield Change("trainer.ema_decay", None)
    yield from fewer_workers(config, hosts, node)
    yield from (change for change in onto_gpus(config, hosts) if has_room(change.applied(config), hosts))


def fewer_workers(config: Config, hosts: Hosts, node: NodeProcesses) -> Iterator[Change]:
    """Yields the number of rollout workers if every node that is short of memory had half as many of them.

    With `rollout.workers_per_node` every node has half as many. Nothing for pools that grow by themselves, and for
    processes that train, too.
    """
    rollout = config.rollout
    if config.placement == SHARED or elastic(rollout) or len(node.workers.get(ROLLOUT, ())) < 2:
        return
    if rollout.workers_per_node is not None:
        half = rollout.workers_per_node - rollout.workers_per_node // 2
        workers = rollout.num_workers // rollout.workers_per_node * half
        yield Change(WORKERS, workers, (Change("rollout.workers_per_node", half),))
        return
    short = [each for each in hosts.nodes if each is node or is_short(config, hosts, each)]
    yield Change(WORKERS, rollout.num_workers - sum(len(each.workers.get(ROLLOUT, ())) // 2 for each in short))


def onto_gpus(config: Config, hosts: Hosts) -> Iterator[Change]:
    """Yields settings that put on a rollout worker's GPU what is in host memory."""
    if ROLLOUT not in hosts.devices:
        return
    if config.versions_on_host:
        yield Change("rollout.versions_on", "device")
    if config.rollout.text_encoder in ("offload", "cached"):
        yield Change("rollout.text_encoder", "resident")


def has_room(config: Config, hosts: Hosts) -> bool:
    """Returns True if the GPU of a rollout worker holds what lies on it all the time, activations left out."""
    model, share = sizes_of(config, hosts), min(1.0, config.rollout.gpus_per_worker)
    footprint: Footprint = rollout_footprint(config, model)
    if config.placement == SHARED and on_gpus(config, hosts, TRAINER):
        footprint = in_one(trainer_footprint(config, model), footprint, full=model.full)
    return footprint.resident <= share * hosts.devices[ROLLOUT]


def _after(change: Change, node: NodeProcesses) -> NodeProcesses:
    """Returns the node with half of its rollout workers, if the change asks for fewer."""
    if change.key != WORKERS:
        return node
    rollouts = node.workers[ROLLOUT]
    return replace(node, workers={**node.workers, ROLLOUT: rollouts[: len(rollouts) - len(rollouts) // 2]})
