"""Finding on seats: whether every worker finds a place in a cluster, and with how many an elastic pool would start."""

from collections.abc import Sequence
from dataclasses import replace

from async_flowrl.doctor.findings import FAILED, OK, WARNING, Finding
from async_flowrl.doctor.network import first
from separation.cluster_probe import Node
from separation.group import PoolSpec
from separation.placement import Resources, ResourcesMissing, check_fits, reserve, totals


def seats(wanted: Sequence[PoolSpec], nodes: Sequence[Node]) -> Finding:
    """Checks that all workers with which a run can start find a place; warns if other programs hold those places now.

    Of a pool with `min_workers` these are as many. The sentence says with how many of it a run would start now, and how
    many may join later.
    """
    everything, free = [node.resources for node in nodes], [node.free for node in nodes]
    try:
        check(wanted, everything, everything)
    except (ResourcesMissing, ValueError) as error:
        return Finding("seats", FAILED, first(error), "fewer workers, or more nodes")
    try:
        check(wanted, everything, free)
    except ResourcesMissing as error:
        return Finding("seats", WARNING, f"others hold them now: {first(error)}", "a run waits for deadlines.load")
    said = ", ".join(told(spec, wanted, nodes) for spec in wanted)
    return Finding("seats", OK, f"free for {said}")


def check(wanted: Sequence[PoolSpec], exists: Sequence[Resources], left: Sequence[Resources]) -> None:
    """Raises ResourcesMissing if the least workers of the pools do not fit into what is `left` of nodes that exist."""
    check_fits(reserve(wanted, totals(exists)), left)


def told(spec: PoolSpec, wanted: Sequence[PoolSpec], nodes: Sequence[Node]) -> str:
    """Returns the pool's name and size; of an elastic pool also with how many it starts, and how many may join."""
    if not spec.elastic:
        return f"{spec.name} {spec.least}"
    now = starting(spec, wanted, nodes)
    return f"{spec.name} {now} (it needs {spec.least}; {spec.most - now} more may join as nodes come)"


def starting(spec: PoolSpec, wanted: Sequence[PoolSpec], nodes: Sequence[Node]) -> int:
    """Returns the number of the pool's workers that find a place now, beside the least of all other pools."""
    everything, free = [node.resources for node in nodes], [node.free for node in nodes]
    most = spec.least
    for count in range(spec.least + 1, spec.most + 1):
        grown = replace(spec, num_workers=max(spec.num_workers, count), min_workers=count)
        try:
            check([grown if one is spec else one for one in wanted], everything, free)
        except ResourcesMissing:
            break
        most = count
    return most
