"""`cluster` starts all worker pools of a run and ends them again."""

import difflib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from separation.group import PoolSpec, WorkerGroup
from separation.local import LocalGroup
from separation.resources import check_store, reserve
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

    backend: "ray" (processes) or "local" (threads of this process); the other arguments matter to Ray alone. address: a
    Ray cluster that runs already; None starts one here. start_deadline: seconds for the reservation, for building the
    workers, and for each replacement. store_bytes: bytes of results that may wait in the object stores.

    Raises ValueError for an unknown backend or two pools of one name; ResourcesMissing or StoreTooSmall if the pools do
    not fit; OtherCode, WorkerFailed, WorkerDied; DeadlineExceeded; HeadLost, which cancels the body. However the body
    ends, all workers are killed, reservations given back, and a cluster that was started here is shut down.
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
    """Raises StoreTooSmall if the object stores of the cluster that `cluster` has started or joined hold too little."""
    # Threads of this process have no store.
    if backend == "ray":
        from separation.ray_cluster import living_resources

        check_store(nbytes, living_resources())
