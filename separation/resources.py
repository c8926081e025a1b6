"""Placement of the workers: what to reserve on a Ray cluster, and a refusal, with a table, of what does not fit.

In Ray's terms, a bundle is an amount of resources on one node, and a placement group is a list of bundles that is
reserved as a whole. A seat is the place of one worker, i.e. its share of a bundle. Nothing here talks to Ray.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from separation.group import PoolSpec
from separation.node import temporary_refusal
from separation.text_table import format_table

Resources = Mapping[str, float]

# Ray's strategies: all bundles on one node, on as few nodes as possible, or each bundle on a node of its own.
STRICT_PACK, PACK, STRICT_SPREAD = "STRICT_PACK", "PACK", "STRICT_SPREAD"
MAX_PROCESSES_PER_CORE = 8  # Limit on the worker processes per core in a cluster that is started on this machine.
EPSILON = 1e-6  # Tolerance in comparisons of sums of fractions of a device.


class ResourcesMissing(RuntimeError):
    """Raised if the cluster lacks resources. The message has a table of what was asked and what exists."""


class StoreTooSmall(ResourcesMissing):
    """Raised if the cluster's object stores are too small for the results that may wait there at the same time."""


@dataclass(frozen=True)
class Reservation:
    name: str
    pool: str
    bundles: tuple[Resources, ...]
    seats: Mapping[int, int]  # Index of a worker → index of its bundle.
    share: Resources  # What a worker has of its bundle.
    apart: bool = False  # True if each bundle must be on a different node.


def needs_of(spec: PoolSpec, exists: Resources) -> dict[str, float]:
    """Returns what a worker of the pool needs, as Ray resources: a CPU, and its device if it needs and finds one."""
    # Without GPUs the device is the custom resource of the pool's name (`own_cluster`), if that exists.
    needs = {"CPU": 1.0}
    if spec.gpus_per_worker > 0 and exists.get("GPU", 0) > 0:
        needs["GPU"] = spec.gpus_per_worker
    elif spec.gpus_per_worker > 0 and exists.get(spec.name, 0) > 0:
        needs[spec.name] = 1.0
    return needs


def reserve(pools: Sequence[PoolSpec], exists: Resources) -> list[Reservation]:
    """Returns the reservations of all pools, in order: process groups first. Raises ValueError for equal pool names.

    A process group is one reservation, and so is a pool with workers_per_node, with one bundle per node. Every other
    worker is a reservation of its own, so that a lost node ends only the workers on it. Elastic pools get their least.
    """
    if len({spec.name for spec in pools}) != len(pools):
        raise ValueError(f"pool names must differ, got {', '.join(spec.name for spec in pools)}")
    reservations: list[Reservation] = []
    for spec in sorted(pools, key=lambda spec: not spec.process_group):
        needs, per_bundle = needs_of(spec, exists), spec.workers_per_node or 1
        if spec.process_group or spec.workers_per_node is not None:
            bundles = (share_of_node(needs, per_bundle),) * (spec.num_workers // per_bundle)
            seats = {index: index // per_bundle for index in range(spec.num_workers)}
            apart = spec.workers_per_node is not None
            reservations.append(Reservation(spec.name, spec.name, bundles, seats, needs, apart))
        else:
            reservations += (
                Reservation(f"{spec.name}-{index}", spec.name, (needs,), {index: 0}, needs)
                for index in range(spec.least)
            )
    return reservations


def own_cluster(pools: Sequence[PoolSpec], cores: int) -> tuple[int, dict[str, float]]:
    """Returns the number of logical CPUs and the custom resources for a cluster started for these pools on one machine.

    The CPUs may exceed `cores`, because most workers wait most of the time. The custom resources stand in for GPUs on a
    machine without any. Raises ResourcesMissing above MAX_PROCESSES_PER_CORE, or without a folder for sockets.
    """
    if refusal := temporary_refusal():
        raise ResourcesMissing(refusal)
    workers = sum(spec.num_workers for spec in pools)
    allowed = cores * MAX_PROCESSES_PER_CORE
    if workers > allowed:
        rows = [(spec.name, spec.num_workers) for spec in pools]
        raise ResourcesMissing(
            f"this machine can't hold {workers} workers: {cores} cores, at most {MAX_PROCESSES_PER_CORE} processes "
            f"each = {allowed}\n{format_table(('pool', 'workers'), rows)}"
        )
    custom: dict[str, float] = {spec.name: float(spec.num_workers) for spec in pools if spec.gpus_per_worker > 0}
    return max(1, workers), custom


def totals(groups: Iterable[Resources]) -> Counter[str]:
    total: Counter[str] = Counter()
    for group in groups:
        total.update(group)
    return total


def check_fits(reservations: Sequence[Reservation], nodes: Sequence[Resources]) -> None:
    """Raises ResourcesMissing if the reservations could never be made, even if nobody else used the cluster."""
    # Because the nodes together have too little, a bundle is larger than every node, or nodes for bundles apart are too
    # few.
    bundles = [bundle for reservation in reservations for bundle in reservation.bundles]
    needed, exists = totals(bundles), totals(nodes)
    for name in needed:
        least = fewest_gpus(bundle.get(name, 0) for bundle in bundles) if name == "GPU" else needed[name]
        if least > exists[name] + EPSILON:
            headline = f"the cluster can't hold what was asked: it has {exists[name]:g} {name} and {least:g} are needed"
            raise ResourcesMissing(shortage(reservations, nodes, headline))
    for bundle in bundles:
        if not any(holds(node, bundle) for node in nodes):
            raise ResourcesMissing(shortage(reservations, nodes, f"no node has {_text(bundle)} together"))
    for reservation in (one for one in reservations if one.apart):
        bundle, count = reservation.bundles[0], len(reservation.bundles)
        if (fitting := sum(holds(node, bundle) for node in nodes)) < count:
            headline = f"{reservation.name} needs {count} nodes with {_text(bundle)} each; such nodes: {fitting}"
            raise ResourcesMissing(shortage(reservations, nodes, headline))


def fewest_gpus(shares: Iterable[float]) -> float:
    """Returns a lower bound of the GPUs for these shares: no GPU is shared by whole shares, or two fractions > 0.5."""
    devices = [share for share in shares if share > 0]
    whole = sum(share for share in devices if share >= 1)
    fractions = [share for share in devices if share < 1]
    large = sum(share > 0.5 + EPSILON for share in fractions)
    return whole + max(math.ceil(sum(fractions) - EPSILON), large)


def packing(reservation: Reservation, free: Sequence[Resources]) -> str:
    """Returns STRICT_PACK if `free`, the free resources of each node, has one with room for all bundles, else PACK."""
    needed = totals(reservation.bundles)
    one = any(holds(node, needed) for node in free)
    return STRICT_PACK if one else PACK


def describe_spread(reservation: Reservation, nodes: Sequence[str]) -> str:
    ranks: dict[str, list[str]] = {}
    for index, bundle in reservation.seats.items():
        ranks.setdefault(nodes[bundle], []).append(f"{reservation.pool}-{index}")
    where = "; ".join(f"{node}: {', '.join(workers)}" for node, workers in ranks.items())
    return f"{reservation.name}: on {len(ranks)} node{'s' if len(ranks) > 1 else ''} ({where})"


def check_store(needed: int, nodes: Sequence[Resources]) -> None:
    """Raises StoreTooSmall if the nodes' object stores together hold less than `needed` bytes."""
    exists = totals(nodes)["object_store_memory"]
    if needed > exists:
        raise StoreTooSmall(
            f"up to {needed / 1e9:.3g} GB of results and weights lie in the object store, which holds "
            f"{exists / 1e9:.3g} GB (30 % of the memory, beyond 10 GB at most /dev/shm, where Ray was not told "
            "otherwise)"
        )


def shortage(
    reservations: Sequence[Reservation],
    nodes: Sequence[Resources],
    headline: str,
    *,
    free: Callable[[str], float] | None = None,
) -> str:
    """Returns the `headline` and tables of what was requested and what exists; `free` gives free amounts, too."""
    shares: dict[str, list[Resources]] = {}
    for reservation in reservations:
        shares.setdefault(reservation.pool, []).extend([reservation.share] * len(reservation.seats))
    pool_rows = [(name, len(each), _text(each[0]), _text(totals(each))) for name, each in shares.items()]
    needed = totals(bundle for reservation in reservations for bundle in reservation.bundles)
    exists = totals(nodes)
    header = ["resource", "asked", "exists", "missing"] + (["free now"] if free else [])
    rows = [
        [name, f"{needed[name]:g}", f"{exists[name]:g}", f"{max(0.0, needed[name] - exists[name]):g}"]
        + ([f"{free(name):g}"] if free else [])
        for name in needed
    ]
    tables = [format_table(("pool", "workers", "each", "all"), pool_rows), format_table(header, rows)]
    return "\n".join([f"{headline}:", *tables])


def _text(resources: Resources) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def share_of_node(needs: Resources, workers: int) -> dict[str, float]:
    # GPUs above 1 are rounded up to a whole number, because Ray cannot reserve 1.5 of them.
    together = {name: amount * workers for name, amount in needs.items()}
    if (gpus := together.get("GPU", 0)) > 1:
        together["GPU"] = float(math.ceil(gpus - EPSILON))
    return together


def holds(node: Resources, bundle: Resources) -> bool:
    return all(node.get(name, 0) >= amount - EPSILON for name, amount in bundle.items())
