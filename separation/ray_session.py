"""This process's connection to a Ray cluster: joins one or starts its own, and leaves nothing of its own behind."""

import asyncio
import json
import logging
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil
import ray
from ray._private import worker as ray_worker
from ray._private.accelerators import get_accelerator_manager_for_resource
from ray._private.ray_constants import RESOURCES_ENVIRONMENT_VARIABLE
from ray._private.state import available_resources_per_node
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
from separation.ray_seats import START_SECONDS, Place, Seats
from separation.ray_watch import HeadLost, watch_head
from separation.supervise import together

log = logging.getLogger(__name__)

ONE_NODE_SECONDS = 20.0
"""How long a gang waits for the one node that had room for it, before it takes several."""
_POLL_SECONDS = 0.02
_GRACE_SECONDS = 5.0
_UNWATCHED = {"task_events_report_interval_ms": 0, "enable_metrics_collection": False}
"""Ray's settings for a cluster of our own, whose task history and metrics nothing reads."""


class RaySession:
    """Placement groups and workers of one run on one cluster."""

    def __init__(self, pools: Sequence[PoolSpec], address: str | None) -> None:
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
            except BaseException:  # a second Ctrl-C, too: Ray forgets the workers that it was starting
                self._daemons = _started_since(before)
                self.close()
                raise
            self._daemons = _started_since(before)

    async def start(
        self,
        *,
        placement: str,
        colocated: tuple[str, str],
        start_deadline: float,
        log_dir: Path | None,
        store_bytes: int,
    ) -> dict[str, WorkerGroup]:
        """Reserves, creates and builds.

        Raises ResourcesMissing, OtherCode, WorkerFailed, WorkerDied, DeadlineExceeded.
        """
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        exists = totals(nodes)
        check_store(store_bytes, nodes)
        reservations = reserve(self._pools, exists, placement=placement, colocated=colocated)
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
        """Never returns; raises HeadLost when the cluster's head is gone, after which Ray is not asked for anything."""
        try:
            await watch_head()
        except HeadLost:
            self._headless = True
            raise

    def close(self) -> None:
        """Kills the workers, gives the reservations back, ends the cluster if it is ours. Blocks for a second or two.

        It awaits nothing, so that no cancellation can interrupt it. Without the head, which would have to be waited
        for, the workers of this machine are killed and nothing else: those of others end by themselves.
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
        """Leaves the cluster, and ends it if it is ours: Ray would wait a second for each daemon that ignores it."""

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
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        common: dict[str, Any] = {
            "log_to_driver": False,
            "logging_level": logging.ERROR,
            # Ray puts one after the other in front of a worker's own, so the first of these has to come last.
            "job_config": JobConfig(_py_driver_sys_path=import_path()[::-1]),
        }
        if address is None:
            # Ray starts workers at nice 15, so that anything else on the machine would take their cores from them.
            os.environ.setdefault("RAY_worker_niceness", "0")
            cpus, custom = own_cluster(self._pools, os.cpu_count() or 1)
            own: dict[str, Any] = {"num_cpus": cpus, "resources": custom, "include_dashboard": False}
            own["_system_config"] = dict(_UNWATCHED)
            start_with_what_runs(lambda: ray.init("local", **own, **common))
        else:
            join(address, **common)
        _log_raylet_messages()

    def _processes(self) -> list[psutil.Process]:
        """Processes of this machine that must be gone at the end: our own daemons, the workers, and their children."""
        workers = [worker for group in self._groups.values() for worker in group.processes()]
        roots = [process for process in [*self._daemons, *workers] if alive(process)]
        return roots + [process for root in roots for process in descendants(root.pid)]

    async def _take(
        self, reservations: Sequence[Reservation], nodes: Sequence[Resources], seconds: float
    ) -> dict[tuple[str, int], Place]:
        """One placement group after the other, so that the first asked is the first served."""
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
        """Asks for one node where one is free, and for few nodes if somebody else has taken that room meanwhile.

        What belongs on nodes of its own is asked for once.
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


def free_by_node(nodes: Sequence[Mapping[str, Any]] | None = None) -> list[Resources]:
    """What is free on every node of `nodes`, or of the cluster, that lives; all of a node that has not reported yet."""
    free, nodes = available_resources_per_node(), ray.nodes() if nodes is None else nodes
    return [free.get(node["NodeID"], node["Resources"]) for node in nodes if node["Alive"]]


def nodes_of(group: PlacementGroup) -> list[str]:
    """Address and short id of the node of every bundle."""
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    placed: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return [f"{address[node]} {node[:6]}" for _, node in sorted(placed.items())]


def _log_spread(reservation: Reservation, of_bundles: Sequence[str], nodes: Sequence[Resources]) -> None:
    spread = describe_spread(reservation, of_bundles)
    if not reservation.apart and len(set(of_bundles)) > 1 and packing(reservation, nodes) == STRICT_PACK:
        log.warning("%s, as others hold what one node would need: whatever its workers exchange is slower", spread)
    else:
        log.info("%s", spread)


def gpus_here() -> float:
    """GPUs that a cluster started on this machine would have, as Ray counts them: it asks the driver, not CUDA."""
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
    """What is started inside never hears SIGTERM, and this process's handler stays: `ray.init` installs its own.

    Slurm, `timeout` and shells send it to every process of a job at once. Whoever is to end in order on it, with a
    checkpoint, needs its workers for that; they are ended by SIGKILL, when it is done with them. The mask of blocked
    signals is inherited by the daemons and by the workers that these start.
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
    """Logs the raylet's remarks on dead workers, which Ray would print over whatever this process displays."""
    if hasattr(ray_worker, "print_to_stdstream"):
        ray_worker.print_to_stdstream = lambda batch, *_, **__: log.info("raylet: %s", " ".join(batch["lines"]))


def import_path() -> list[str]:
    """The folders on this process's import path that a fresh interpreter would not have: workers need them too."""
    standard = {os.path.realpath(path) for path in sysconfig.get_paths().values()}
    standard |= {os.path.join(path, "lib-dynload") for path in standard}
    folders = [os.path.realpath(path or os.getcwd()) for path in sys.path]
    return [path for path in dict.fromkeys(folders) if os.path.isdir(path) and path not in standard]
