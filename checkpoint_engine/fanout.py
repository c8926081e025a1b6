"""The fan-out tree of a payload: it says which receivers get it from the sender, and which from other receivers.

The tree limits the number of receivers that one process serves, and the number of nodes that one node sends to.
Delivery (delivery.py) uses it.
"""

from collections.abc import Mapping
from types import MappingProxyType

MAX_FAN_OUT = 32
"""Largest number of receivers that one process serves on each level of the tree."""
NODE_FAN_OUT = 2
"""Largest number of nodes to which one node sends a payload; each of them costs one copy over the network."""


def parents(
    nodes: Mapping[str, str],
    holders: Mapping[str, str] = MappingProxyType({}),
    *,
    max_fan_out: int = MAX_FAN_OUT,
    node_fan_out: int = NODE_FAN_OUT,
) -> dict[str, str | None]:
    """Returns receiver → the receiver from which it gets the payload; None stands for the sender.

    `nodes` is receiver → its node. `holders` (node → receiver) have the payload already and serve their own nodes. The
    other nodes form a tree: the sender serves the first receiver of `node_fan_out` nodes, each of these serves the
    first receiver of as many further nodes, and so on. On a node, the other receivers are served by the first one, in
    a tree with `max_fan_out` children per receiver. Only if the nodes that the sender serves have at most `max_fan_out`
    receivers together, the sender serves all of these itself. Raises ValueError if a limit is below 1.
    """
    for name, value in (("max_fan_out", max_fan_out), ("node_fan_out", node_fan_out)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    by_node: dict[str, list[str]] = {}
    for name, node in nodes.items():
        by_node.setdefault(node, []).append(name)
    plan: dict[str, str | None] = {}
    for node in by_node.keys() & holders.keys():
        plan |= _levels(by_node.pop(node), holders[node], max_fan_out)
    others = list(by_node.values())
    direct = sum(len(names) for names in others[:node_fan_out]) <= max_fan_out
    plan |= _levels([names[0] for names in others], None, node_fan_out)
    for index, (leader, *neighbours) in enumerate(others):
        if direct and index < node_fan_out:
            plan |= dict.fromkeys(neighbours)
        else:
            plan |= _levels(neighbours, leader, max_fan_out)
    return plan


def depth(plan: Mapping[str, str | None], name: str) -> int:
    """Returns the number of receivers through which the payload passes before it reaches `name`."""
    hops = 0
    while (above := plan.get(name)) is not None:
        name, hops = above, hops + 1
    return hops


def leaders(nodes: Mapping[str, str]) -> list[str]:
    """Returns the first receiver of each node, in the order of `nodes` (receiver → its node)."""
    first: dict[str, str] = {}
    for name, node in nodes.items():
        first.setdefault(node, name)
    return list(first.values())


def _levels(names: list[str], root: str | None, width: int) -> dict[str, str | None]:
    """Returns receiver → parent for a tree under `root` with `width` children per receiver, in the order of `names`."""
    return {name: root if i < width else names[i // width - 1] for i, name in enumerate(names)}
