"""The fan-out tree of a payload, which bounds how many receivers any one process serves."""

from collections.abc import Mapping

MAX_FAN_OUT = 32
"""Receivers that one process serves, at most, on each level of the tree."""


def parents(nodes: Mapping[str, str], *, max_fan_out: int = MAX_FAN_OUT) -> dict[str, str | None]:
    """For each receiver (name → its node): the receiver that hands it the payload, None for the sender itself.

    Up to `max_fan_out` receivers are all served by the sender. Above, one leader per node is, and passes the payload
    on to its neighbours; more than `max_fan_out` leaders, or neighbours, form further levels of the same width.
    """
    if max_fan_out < 1:
        raise ValueError(f"max_fan_out must be >= 1, got {max_fan_out}")
    if len(nodes) <= max_fan_out:
        return dict.fromkeys(nodes)
    by_node: dict[str, list[str]] = {}
    for name, node in nodes.items():
        by_node.setdefault(node, []).append(name)
    leaders = [names[0] for names in by_node.values()]
    plan: dict[str, str | None] = _levels(leaders, None, max_fan_out)
    for leader, *neighbours in by_node.values():
        plan |= _levels(neighbours, leader, max_fan_out)
    return plan


def _levels(names: list[str], root: str | None, width: int) -> dict[str, str | None]:
    """A tree of `width` children per receiver in list order, under `root`."""
    return {name: root if i < width else names[i // width - 1] for i, name in enumerate(names)}
