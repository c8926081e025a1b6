"""RaySession is the connection of one run to a Ray cluster: it joins or starts the cluster and cleans up at the end.

cluster.py and survey.py use it.
"""

import asyncio
import json
import logging
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil
import ray
from ray._private import worker as ray_worker
from ray._private.accelerators import get_accelerator_manager_for_resource
from ray._private.ray_constants import RESOURCES_ENVIRONMENT_VARIABLE
from ray.job_config import JobConfig
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from separation.group import PoolSpec, WorkerGroup
from separation.placement import (
    PACK,
    STRICT_PACK,
    STRICT_SPREAD,
    Reservation,
    Resources,
    ResourcesMissing,
    check_fits,
    check_store,
    describe_spread,
    needs_of,
    own_cluster,
    packing,
    reserve,
    shortage,
    totals,
)
from separation.processes import alive, descendants, kill, kill_remaining
from separation.ray_group import RayGroup
from separation.ray_growth import RayGrowth
from separation.ray_head import start_with_what_runs
from separation.ray_join import join
from separation.ray_nodes import free_by_node, living_resources, nodes_of
from separation.ray_seats import START_SECONDS, Place, Seats
from separation.ray_watch import HeadLost, watch_head
from separation.supervise import together

log = logging.getLogger(__name__)

ONE_NODE_SECONDS = 20.0
"""Time for which a gang waits for the one node that had room for it; then it takes several nodes."""
_POLL_SECONDS = 0.02
_GRACE_SECONDS = 5.0
"""Time for which remaining processes may live on before they are killed."""
LEAN = {
    "task_events_report_interval_ms": 0,
    "enable_metrics_collection": False,
    "event_stats": False,
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
}
"""Settings of Ray for a cluster that is started here. Its task history, metrics and statistics of handlers are off,
because nothing reads them, and so are the workers that it starts ahead, because those of a pool have an environment of
their own."""


class RaySession:
    """The placement groups and workers of one run on one cluster."""

    def __init__(self, pools: Sequence[PoolSpec], address: str | None) -> None:
        """Joins the cluster at `address`, or starts one on this machine if it is None.

        If this process is connected to Ray already, that connection is used. Raises ResourcesMissing if the cluster
        cannot be joined, or if this machine is too small for the pools.
        """
        self._pools = pools
        self._placement_groups: list[PlacementGroup] = []
        self._groups: dict[str, RayGroup] = {}
        self._connected = not ray.is_initialized()
        self._daemons: list[psutil.Process] = []
        self._headless = False
        if self._connected:
            before = descendants(os.getpid())
            try:
                with _sigterm_ours_alone():
                    self._connect(address)
            except BaseException:  # Also after a second Ctrl-C: Ray would leave the processes that it was starting.
                self._daemons = _started_since(before)
                self.close()
                raise
            self._daemons = _started_since(before)

    async def start(
        self,
        *,
        start_deadline: float,
        log_dir: Path | None,
        store_bytes: int,
    ) -> dict[str, WorkerGroup]:
        """Reserves the places of all pools, builds their workers, and returns pool name → pool.

        The arguments are those of `cluster` (cluster.py). Raises ResourcesMissing, OtherCode, WorkerFailed, WorkerDied
        or DeadlineExceeded.
        """
        nodes = living_resources()
        exists = totals(nodes)
        check_store(store_bytes, nodes)
        reservations = reserve(self._pools, exists)
        check_fits(reservations, nodes)
        places = await self._take(reservations, nodes, start_deadline)
        for spec in self._pools:
            seated = [places[spec.name, index] for index in range(spec.least)]
            seats = Seats(needs_of(spec, exists), spec.most, self._placement_groups) if spec.elastic else None
            if seats is not None:
                seated = [seats.adopt(place.group) for place in seated] + await seats.available(START_SECONDS)
            group = RayGroup(spec, seated, start_deadline=start_deadline, log_dir=log_dir, seats=seats)
            group.growth = RayGrowth(group, seats) if seats is not None else None
            self._groups[spec.name] = group
        await together(*(group.start() for group in self._groups.values()))
        return {**self._groups}

    async def watch(self) -> NoReturn:
        """Raises HeadLost when the cluster's head is lost; never returns. `close` then asks nothing of Ray any more."""
        try:
            await watch_head()
        except HeadLost:
            self._headless = True
            raise

    def close(self) -> None:
        """Kills the workers, gives back the reservations, ends a cluster started here; blocks for some seconds.

        It awaits nothing, so no cancellation can interrupt it. If the head is lost, Ray would block for long; then only
        the processes on this machine are killed, and workers on other nodes end themselves (ray_fence.py).
        """
        ours = self._processes()
        if self._headless:
            for process in ours:
                kill(process)
        elif ray.is_initialized():
            for group in self._groups.values():
                group.kill()
            for reserved in self._placement_groups:
                remove_placement_group(reserved)
            if self._connected:
                self._disconnect()
        for process in kill_remaining(ours, grace=_GRACE_SECONDS):
            log.warning("killed process %d, which outlived its cluster by %g s", process.pid, _GRACE_SECONDS)

    def _disconnect(self) -> None:
        """Leaves the cluster, and ends it if it was started here.

        Ray's shutdown waits a second for each daemon that ignores SIGTERM, so a thread kills the daemons meanwhile.
        """

        def kill_daemons() -> None:
            while ray.is_initialized():
                time.sleep(_POLL_SECONDS)
            for daemon in self._daemons:
                kill(daemon)

        killer = threading.Thread(target=kill_daemons, name="end of the cluster", daemon=True)
        killer.start()
        ray.shutdown()
        killer.join(_GRACE_SECONDS)

    def _connect(self, address: str | None) -> None:
        """Joins the cluster at `address`, or starts one for the pools on this machine if it is None."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        common: dict[str, Any] = {
            "log_to_driver": False,
            "logging_level": logging.ERROR,
            # Ray inserts these folders one by one at the front of a worker's sys.path, so the first has to come last.
            "job_config": JobConfig(_py_driver_sys_path=import_path()[::-1]),
        }
        if address is None:
            # By default Ray starts workers at nice 15; any other process on the machine would then slow them down.
            os.environ.setdefault("RAY_worker_niceness", "0")
            cpus, custom = own_cluster(self._pools, os.cpu_count() or 1)
            own: dict[str, Any] = {"num_cpus": cpus, "resources": custom, "include_dashboard": False}
            own["_system_config"] = dict(LEAN)
            start_with_what_runs(lambda: ray.init("local", **own, **common))
        else:
            join(address, **common)
        _log_raylet_messages()

    def _processes(self) -> list[psutil.Process]:
        """Returns this machine's processes that must be gone at the end: own daemons, workers, and their children."""
        workers = [worker for group in self._groups.values() for worker in group.processes()]
        roots = [process for process in [*self._daemons, *workers] if alive(process)]
        return roots + [process for root in roots for process in descendants(root.pid)]

    async def _take(
        self, reservations: Sequence[Reservation], nodes: Sequence[Resources], seconds: float
    ) -> dict[tuple[str, int], Place]:
        """Reserves a placement group for each reservation, in order, so that earlier reservations are served first.

        Returns (pool, index) → place. Raises ResourcesMissing after `seconds`.
        """
        places: dict[tuple[str, int], Place] = {}
        pending: list[PlacementGroup] = []
        try:
            async with asyncio.timeout(seconds):
                for reservation in reservations:
                    taken = await self._reserve(reservation)
                    pending.append(taken)
                    if len(reservation.bundles) > 1:
                        await _created(taken)
                        _log_spread(reservation, nodes_of(taken), nodes)
                    for seat in reservation.seats:
                        places[seat.pool, seat.index] = Place(taken, seat.bundle, seat.share)
                for taken in pending:
                    await _created(taken)
        except TimeoutError as error:
            free = ray.available_resources()
            headline = f"the cluster did not free what was asked within {seconds:g} s"
            text = shortage(reservations, nodes, headline, free=lambda name: free.get(name, 0.0))
            raise ResourcesMissing(text) from error
        return places

    async def _reserve(self, reservation: Reservation) -> PlacementGroup:
        """Requests a placement group: on one node if one has room now, otherwise on few nodes.

        If another user takes the room meanwhile, the request for one node is replaced after ONE_NODE_SECONDS. A
        reservation whose bundles must be on different nodes is requested once.
        """
        one_or_few = (packing(reservation, free_by_node()), PACK)
        for strategy in (STRICT_SPREAD,) if reservation.apart else dict.fromkeys(one_or_few):
            taken = placement_group([dict(bundle) for bundle in reservation.bundles], strategy=strategy)
            self._placement_groups.append(taken)
            if strategy != STRICT_PACK or len(reservation.bundles) == 1:
                break
            with suppress(TimeoutError):
                await asyncio.wait_for(_created(taken), ONE_NODE_SECONDS)
                break
            remove_placement_group(taken)
            self._placement_groups.remove(taken)
        return taken


def _started_since(before: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [process for process in descendants(os.getpid()) if process not in before]


def _log_spread(reservation: Reservation, of_bundles: Sequence[str], nodes: Sequence[Resources]) -> None:
    spread = describe_spread(reservation, of_bundles)
    if not reservation.apart and len(set(of_bundles)) > 1 and packing(reservation, nodes) == STRICT_PACK:
        log.warning("%s, as others hold what one node would need: whatever its workers exchange is slower", spread)
    else:
        log.info("%s", spread)


def gpus_here() -> float:
    """Returns the number of GPUs that a cluster started on this machine would have, by Ray's count, without CUDA."""
    if "GPU" in (given := json.loads(os.environ.get(RESOURCES_ENVIRONMENT_VARIABLE, "{}"))):
        return float(given["GPU"])
    if (manager := get_accelerator_manager_for_resource("GPU")) is None:
        return 0.0
    count, visible = (
        manager.get_current_node_num_accelerators(),
        manager.get_current_process_visible_accelerator_ids(),
    )
    return float(count if visible is None else min(count, len(visible)))


async def _created(group: PlacementGroup) -> None:
    while placement_group_table(group)["state"] != "CREATED":  # noqa: ASYNC110
        await asyncio.sleep(_POLL_SECONDS)


@contextmanager
def _sigterm_ours_alone() -> Iterator[None]:
    """Context in which started processes inherit a blocked SIGTERM; it also keeps this process's own SIGTERM handler.

    `ray.init` replaces the handler. Slurm, `timeout` and shells send SIGTERM to every process of a job. This process
    then ends in order, with a checkpoint, and needs its workers for that; they are ended by SIGKILL when it is done.
    Daemons and the workers that they start inherit the mask of blocked signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _log_raylet_messages() -> None:
    """Logs the raylet's messages on dead workers, which Ray would print into this process's terminal display."""
    if hasattr(ray_worker, "print_to_stdstream"):
        ray_worker.print_to_stdstream = lambda batch, *_, **__: log.info("raylet: %s", " ".join(batch["lines"]))


def import_path() -> list[str]:
    """Returns the folders of this process's import path that a fresh interpreter lacks; workers need them, too."""
    standard = {os.path.realpath(path) for path in sysconfig.get_paths().values()}
    standard |= {os.path.join(path, "lib-dynload") for path in standard}
    folders = [os.path.realpath(path or os.getcwd()) for path in sys.path]
    return [path for path in dict.fromkeys(folders) if os.path.isdir(path) and path not in standard]
