"""Pools with a fixed number of workers per node, and the table of who would sit where."""

import math
from collections.abc import Mapping, Sequence

from separation.table import format_table

Resources = Mapping[str, float]

EPSILON = 1e-6
"""Sums of fractions of a device are equal within it."""
_ADDRESS = "node:"
"""Ray gives every node a resource of this name and its address."""


def share_of_node(needs: Resources, workers: int) -> dict[str, float]:
    """What so many workers need of one node. Devices are whole: Ray gives no one and a half."""
    together = {name: amount * workers for name, amount in needs.items()}
    if (gpus := together.get("GPU", 0)) > 1:
        together["GPU"] = float(math.ceil(gpus - EPSILON))
    return together


def holds(node: Resources, bundle: Resources) -> bool:
    return all(node.get(name, 0) >= amount - EPSILON for name, amount in bundle.items())


def address_of(node: Resources) -> str:
    """The node's address, as Ray names it among its resources; `?` where it does not."""
    names = (name.removeprefix(_ADDRESS) for name in node if name.startswith(_ADDRESS))
    return next((name for name in names if not name.startswith("__")), "?")


def seating(groups: Sequence[tuple[Sequence[Resources], Sequence[str], bool]], nodes: Sequence[Resources]) -> str:
    """The table of who would sit where if every bundle took the first node with room, and who nowhere.

    Each group has its bundles, the workers of each bundle, and whether its bundles must be on different nodes.
    """
    left = [dict(node) for node in nodes]
    placed: list[list[str]] = [[] for _ in nodes]
    nowhere: list[str] = []
    for bundles, workers, apart in groups:
        used: set[int] = set()
        for bundle, names in zip(bundles, workers, strict=True):
            fits = (index for index, node in enumerate(left) if holds(node, bundle) and not (apart and index in used))
            if (index := next(fits, None)) is None:
                nowhere.append(names)
                continue
            used.add(index)
            placed[index].append(names)
            for name, amount in bundle.items():
                left[index][name] -= amount
    asked = list(dict.fromkeys(name for bundles, _, _ in groups for bundle in bundles for name in bundle))
    rows = [
        (address_of(node), ", ".join(f"{node.get(name, 0):g} {name}" for name in asked), ", ".join(names))
        for node, names in zip(nodes, placed, strict=True)
    ]
    if nowhere:
        rows.append(("nowhere", "", ", ".join(nowhere)))
    return format_table(("node", "has", "would hold"), rows)
