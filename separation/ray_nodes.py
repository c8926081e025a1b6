"""Functions that ask Ray about the nodes of the cluster that this process has joined: addresses and resources."""

from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group_table

from separation.placement import Resources


def living_resources() -> list[Resources]:
    """Returns all resources of each living node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def free_by_node(nodes: Sequence[Mapping[str, Any]] | None = None) -> list[Resources]:
    """Returns the free resources of each living node; all of its resources for a node that has not reported yet.

    `nodes` are entries of `ray.nodes()`; None means all nodes of the cluster.
    """
    free, nodes = available_resources_per_node(), ray.nodes() if nodes is None else nodes
    return [free.get(node["NodeID"], node["Resources"]) for node in nodes if node["Alive"]]


def nodes_of(group: PlacementGroup) -> list[str]:
    """Returns address and short id of each bundle's node."""
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    placed: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return [f"{address[node]} {node[:6]}" for _, node in sorted(placed.items())]
