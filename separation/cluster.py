"""`cluster` is the context manager that starts all worker pools of a run and ends them again.

run/launch.py uses it.
"""

import difflib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from separation.group import PoolSpec, WorkerGroup
from separation.local import LocalGroup
from separation.placement import check_store, reserve
from separation.supervise import supervised, together


@asynccontextmanager
async def cluster(
    pools: Sequence[PoolSpec],
    *,
    backend: str = "ray",
    address: str | None = None,
    start_deadline: float = 900.0,
    log_dir: Path | None = None,
    store_bytes: int = 0,
) -> AsyncIterator[Mapping[str, WorkerGroup]]:
    """Starts the pools and yields pool name → pool, when all workers are built.

    backend: "ray" (processes on a Ray cluster) or "local" (threads of this process).
    address: address of a Ray cluster that runs already; None starts a cluster on this machine (Ray only).
    start_deadline: seconds for the reservation, for building the workers, and for each replacement.
    log_dir: stdout, stderr and log records of each worker go to <log_dir>/<name>.log (Ray only).
    store_bytes: bytes of results that may wait in Ray's object stores at the same time (Ray only).

    Raises ValueError for an unknown backend or two pools of one name; ResourcesMissing, with a table, if the pools do
    not fit; StoreTooSmall if the object stores are too small; OtherCode, WorkerFailed or WorkerDied if a worker can't
    be built; DeadlineExceeded. The body is cancelled and HeadLost raised if the head of a cluster at `address` is lost.

    When the body ends, also by an exception, cancellation or Ctrl-C, every worker is killed, reservations are given
    back, and a cluster that was started here is shut down.
    """
    if backend == "ray":
        from separation.ray_cluster import RayConnection, RaySession

        session = RaySession(pools, RayConnection(pools, address))
        try:
            async with supervised(*([session.watch()] if address is not None else [])):
                yield await session.start(start_deadline=start_deadline, log_dir=log_dir, store_bytes=store_bytes)
        finally:
            session.close()
    elif backend == "local":
        reserve(pools, {})
        local = {spec.name: LocalGroup(spec, start_deadline=start_deadline) for spec in pools}
        try:
            await together(*(group.start() for group in local.values()))
            yield local
        finally:
            for group in local.values():
                await group.close()
    else:
        near = difflib.get_close_matches(backend, ("ray", "local"), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"backend must be ray or local, got {backend!r}{hint}")


def check_results(backend: str, nbytes: int) -> None:
    """Checks the room for results of the cluster that `cluster` has started or joined.

    Raises StoreTooSmall if its object stores hold less than `nbytes` bytes. Threads of this process have no store, so
    with the backend "local" nothing is checked.
    """
    if backend == "ray":
        from separation.ray_cluster import living_resources

        check_store(nbytes, living_resources())
