"""Helpers for placement.py: the resources of several workers on one node, and a table of a possible seating."""

import math
from collections.abc import Mapping, Sequence

from separation.table import format_table

Resources = Mapping[str, float]

EPSILON = 1e-6
"""Tolerance in comparisons of sums of fractions of a device."""
_ADDRESS = "node:"
"""Prefix of the resource that Ray gives every node; the node's address follows it."""


def share_of_node(needs: Resources, workers: int) -> dict[str, float]:
    """Returns the resources that `workers` workers need together on one node.

    A number of GPUs above 1 is rounded up to a whole one, because Ray cannot reserve, for example, 1.5 GPUs.
    """
    together = {name: amount * workers for name, amount in needs.items()}
    if (gpus := together.get("GPU", 0)) > 1:
        together["GPU"] = float(math.ceil(gpus - EPSILON))
    return together


def holds(node: Resources, bundle: Resources) -> bool:
    """Returns True if the node has at least the resources of the bundle."""
    return all(node.get(name, 0) >= amount - EPSILON for name, amount in bundle.items())


def address_of(node: Resources) -> str:
    """Returns the node's address, from the names of its resources; `?` if none of them contains it."""
    names = (name.removeprefix(_ADDRESS) for name in node if name.startswith(_ADDRESS))
    return next((name for name in names if not name.startswith("__")), "?")


def seating(groups: Sequence[tuple[Sequence[Resources], Sequence[str], bool]], nodes: Sequence[Resources]) -> str:
    """Returns a table of the workers on each node, and of those without room, if bundles took the first fitting nodes.

    Each group consists of its bundles, the names of each bundle's workers, and whether its bundles must be on different
    nodes.
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
