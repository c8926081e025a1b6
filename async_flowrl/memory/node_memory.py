"""Comparison of the planned host memory with the nodes of a run, made before its models are loaded.

Everything is counted from the headers of the model's files, without
activations, object store and models of rewards; importing this module loads no model code.
"""

from collections import Counter

from async_flowrl.config.check import ConfigError
from async_flowrl.config.schema import Config
from async_flowrl.memory.host_needs import PROCESS_BYTES
from async_flowrl.memory.node_needs import gib, needs_on, processes_on
from async_flowrl.memory.nodes import Hosts, NodeProcesses
from async_flowrl.memory.unplanned import or_warning

LESS = "fewer workers on a node, or a smaller max_staleness, need less"


def check_hosts(config: Config, hosts: Hosts) -> list[str]:
    """Returns a warning for each node whose free memory is less than what its processes will take.

    Raises ConfigError if what they need in any case (least_memory.py) exceeds all memory and swap space of a node,
    unless `allow_oom` is set. Any other failure, such as a model whose tensors have other names than `full.freeze`,
    becomes a warning, because the run may still succeed.
    """

    def compare() -> list[str]:
        return [sentence for node in hosts.nodes if (sentence := compared(config, hosts, node)) is not None]

    return or_warning("the nodes' memory", compare)


def compared(config: Config, hosts: Hosts, node: NodeProcesses) -> str | None:
    """Returns a sentence on a node without enough free memory, else None. Raises ConfigError as `check_hosts` does."""
    needs, memory = needs_on(config, hosts, node), node.memory
    needed, least = sum(need.total for need in needs), sum(need.least for need in needs)
    coming = needed - processes_on(config, node) * PROCESS_BYTES  # which the processes have taken already
    refused = least > memory.total + memory.swap
    if not refused and coming <= memory.free:
        return None
    rows = Counter(map(str, needs))
    listed = "; ".join(row if count == 1 else f"{count} × {row}" for row, count in rows.items())
    if not refused:
        there = f"{gib(memory.free)} GiB of memory free, and the processes of this run on it may take"
        return f"node {node.address} has {there} {gib(coming)} GiB more: {listed}; {LESS}"
    swap = f" and {gib(memory.swap)} of swap space" if memory.swap else ""
    there = f"{gib(memory.total)} GiB of memory{swap}, and the processes of this run on it need at least {gib(least)}"
    sentence = f"node {node.address} has {there}, by plan {gib(needed)} GiB: {listed}; {LESS}"
    if not config.allow_oom:
        raise ConfigError(f"{sentence}; allow_oom=true tries anyway")
    return sentence
