"""The fan-out tree of a payload, which bounds how many receivers any one process serves."""

from collections.abc import Mapping
from types import MappingProxyType

MAX_FAN_OUT = 32
"""Receivers that one process serves, at most, on each level of the tree."""


def parents(
    nodes: Mapping[str, str], holders: Mapping[str, str] = MappingProxyType({}), *, max_fan_out: int = MAX_FAN_OUT
) -> dict[str, str | None]:
    """For each receiver (name → its node): the receiver that hands it the payload, None for the sender itself.

    `holders` (node → name) have the payload already and pass it on to their neighbours. Up to `max_fan_out` of the
    other receivers are all served by the sender. Above, one leader per node is, and passes the payload on to its
    neighbours; more than `max_fan_out` leaders, or neighbours, form further levels of the same width.
    """
    if max_fan_out < 1:
        raise ValueError(f"max_fan_out must be >= 1, got {max_fan_out}")
    by_node: dict[str, list[str]] = {}
    for name, node in nodes.items():
        by_node.setdefault(node, []).append(name)
    plan: dict[str, str | None] = {}
    for node in by_node.keys() & holders.keys():
        plan |= _levels(by_node.pop(node), holders[node], max_fan_out)
    if len(nodes) - len(plan) <= max_fan_out:
        return plan | dict.fromkeys(name for names in by_node.values() for name in names)
    plan |= _levels([names[0] for names in by_node.values()], None, max_fan_out)
    for leader, *neighbours in by_node.values():
        plan |= _levels(neighbours, leader, max_fan_out)
    return plan


def leaders(nodes: Mapping[str, str]) -> list[str]:
    """The first receiver (name → its node) of each node, in order."""
    first: dict[str, str] = {}
    for name, node in nodes.items():
        first.setdefault(node, name)
    return list(first.values())


def _levels(names: list[str], root: str | None, width: int) -> dict[str, str | None]:
    """A tree of `width` children per receiver in list order, under `root`."""
    return {name: root if i < width else names[i // width - 1] for i, name in enumerate(names)}
