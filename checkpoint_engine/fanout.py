"""Who gets a payload from whom, so that no one end serves more than a few dozen."""

from collections.abc import Mapping

DEGREE = 32


def parents(nodes: Mapping[str, str], *, degree: int = DEGREE) -> dict[str, str | None]:
    """For each receiver (name → its node): the receiver that hands it the payload, None for the sender itself.

    Up to `degree` receivers are all served by the sender. Above, one leader per node is, and passes the payload on to
    its neighbours; more than `degree` leaders, or neighbours, form further levels of the same width.
    """
    if degree < 1:
        raise ValueError(f"degree must be >= 1, got {degree}")
    if len(nodes) <= degree:
        return dict.fromkeys(nodes)
    by_node: dict[str, list[str]] = {}
    for name, node in nodes.items():
        by_node.setdefault(node, []).append(name)
    leaders = [names[0] for names in by_node.values()]
    plan: dict[str, str | None] = _levels(leaders, None, degree)
    for leader, *neighbours in by_node.values():
        plan |= _levels(neighbours, leader, degree)
    return plan


def _levels(names: list[str], root: str | None, degree: int) -> dict[str, str | None]:
    """A tree of `degree` children per node in list order, under `root`."""
    return {name: root if i < degree else names[i // degree - 1] for i, name in enumerate(names)}
