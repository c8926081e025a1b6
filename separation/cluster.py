"""One context that holds all pools of a run: whatever happens inside, nothing is left behind when it ends."""

import difflib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from separation.group import PoolSpec, WorkerGroup
from separation.local import LocalGroup
from separation.placement import reserve
from separation.supervise import supervised, together

BACKENDS = ("ray", "local")


@asynccontextmanager
async def cluster(
    pools: Sequence[PoolSpec],
    *,
    backend: str = "ray",
    address: str | None = None,
    placement: str = "separate",
    colocated: tuple[str, str] = ("rollout", "trainer"),
    start_deadline: float = 900.0,
    log_dir: Path | None = None,
    store_bytes: int = 0,
) -> AsyncIterator[Mapping[str, WorkerGroup]]:
    """Starts the pools, all workers built and ready, and yields them by name.

    backend: "ray" (processes on a cluster; one of our own when `address` is None) or "local" (threads of this process).
    placement: "separate", or "colocated": worker i of both pools in `colocated` shares one device.
    start_deadline: seconds for reservation and for building the workers; also for each replacement.
    log_dir: stdout, stderr and log records of each worker go to <log_dir>/<name>.log (Ray only).
    store_bytes: results that may wait in the object store at the same time; a smaller store is refused (Ray only).

    Raises ResourcesMissing with a table, StoreTooSmall, OtherCode, WorkerFailed or WorkerDied when a worker can't be
    built, DeadlineExceeded; later HeadLost, where the head of a cluster that is not our own goes away.
    On leaving, also by exception, cancellation or Ctrl-C, every worker is killed, reservations are given back, and a
    cluster of our own is shut down.
    """
    if backend == "ray":
        from separation.ray_session import RaySession

        session = RaySession(pools, address)
        try:
            async with supervised(*([session.watch()] if address is not None else [])):
                yield await session.start(
                    placement=placement,
                    colocated=colocated,
                    start_deadline=start_deadline,
                    log_dir=log_dir,
                    store_bytes=store_bytes,
                )
        finally:
            session.close()
    elif backend == "local":
        reserve(pools, {}, placement=placement, colocated=colocated)
        local = {spec.name: LocalGroup(spec, start_deadline=start_deadline) for spec in pools}
        try:
            await together(*(group.start() for group in local.values()))
            yield local
        finally:
            for group in local.values():
                await group.close()
    else:
        near = difflib.get_close_matches(backend, BACKENDS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}{hint}")
