"""The fan-out tree of a payload, which bounds how many receivers any one process serves, and how many nodes."""

from collections.abc import Mapping
from types import MappingProxyType

MAX_FAN_OUT = 32
"""Receivers that one process serves, at most, on each level of the tree."""
NODE_FAN_OUT = 2
"""Nodes that one node sends a payload to, at most: each costs its link a copy, however many receivers sit there."""


def parents(
    nodes: Mapping[str, str],
    holders: Mapping[str, str] = MappingProxyType({}),
    *,
    max_fan_out: int = MAX_FAN_OUT,
    node_fan_out: int = NODE_FAN_OUT,
) -> dict[str, str | None]:
    """For each receiver (name → its node): the receiver that hands it the payload, None for the sender itself.

    `holders` (node → name) have the payload already and pass it on to their neighbours. The other nodes form a tree:
    the sender serves `node_fan_out` of them, the first receiver of each serves as many further nodes, and so on.
    Receivers of the nodes that the sender serves all get it from there, which is one copy per node; more than
    `max_fan_out` of them, and those of other nodes, get it from the first receiver of their node, on levels of
    that width.
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
    """How many receivers the payload passes through before it reaches this one."""
    hops = 0
    while (above := plan.get(name)) is not None:
        name, hops = above, hops + 1
    return hops


def leaders(nodes: Mapping[str, str]) -> list[str]:
    """The first receiver (name → its node) of each node, in order."""
    first: dict[str, str] = {}
    for name, node in nodes.items():
        first.setdefault(node, name)
    return list(first.values())


def _levels(names: list[str], root: str | None, width: int) -> dict[str, str | None]:
    """A tree of `width` children per receiver in list order, under `root`."""
    return {name: root if i < width else names[i // width - 1] for i, name in enumerate(names)}
