"""The Ray cluster of a run: RayConnection joins or starts one, RaySession builds the workers there and cleans up."""

import asyncio
import logging
import os
import sys
import sysconfig
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn

import psutil
import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from separation.group import PoolSpec, WorkerGroup
from separation.head_watchdog import DRIVER_SHARE_OF_PATIENCE, HeadLost, head, ray_patience, unreachable, watch_address
from separation.processes import (
    alive,
    ctrl_c_ignored,
    descendants,
    kill,
    kill_remaining,
    kill_trees,
    sigterm_ours_alone,
)
from separation.ray_internals import free_by_node, job_config, keep_terminal_clear
from separation.ray_pool import START_SECONDS, RayGroup, ReservedSeat, Seats
from separation.resources import (
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
from separation.supervise import together

log = logging.getLogger(__name__)

GRACE_SECONDS = 5.0  # Time for which remaining processes may live on before they are killed.
_REACH_SECONDS = 20.0  # Time-out for the connection to a running cluster.
# Time for which a process group waits for the one node that had room for it; then it takes several nodes.
ONE_NODE_SECONDS = 20.0
_POLL_SECONDS = 0.02
STARTS = 3  # Attempts to start a cluster on this machine.
TIMED_OUT = "timed out during startup"  # Of Ray, if a daemon has not registered within 30 s, which no setting changes.
MODE = "RAY_AUTH_MODE"  # Environment variable with Ray's mode of authentication.


class RayConnection:
    """The connection of this process to a Ray cluster, and the daemons of a cluster that was started for it."""

    def __init__(self, pools: Sequence[PoolSpec], address: str | None) -> None:
        """Joins the cluster at `address`, or starts one on this machine for the pools if it is None.

        A connection that this process has already is used. Raises ResourcesMissing if the cluster cannot be joined, or
        this machine is too small for the pools. If it raises anything, no process that it started is left.
        """
        self.ours = not ray.is_initialized()  # True if the connection was made here, so that `disconnect` may end it.
        self.daemons: list[psutil.Process] = []
        if self.ours:
            before = descendants(os.getpid())

            def started() -> list[psutil.Process]:
                return [process for process in descendants(os.getpid()) if process not in before]

            for attempt in range(1, STARTS + 1):
                try:
                    with sigterm_ours_alone():
                        _connect(pools, address)
                    break
                except BaseException as error:  # Also Ctrl-C: Ray would leave the processes that it was starting.
                    with ctrl_c_ignored():
                        if ray.is_initialized():
                            ray.shutdown()
                        kill_remaining(kill_trees(started), grace=GRACE_SECONDS)
                    if TIMED_OUT not in str(error):
                        raise
                    slow = f"Ray did not start on this machine within its limit of 30 s, {attempt} of {STARTS} times"
                    if attempt == STARTS:
                        raise ResourcesMissing(f"{slow}: the cores or the disk are busy; see Ray's logs") from error
                    log.warning("%s; it is started again", slow)
            self.daemons = started()

    def close(self) -> None:
        processes = [*self.daemons, *(child for daemon in self.daemons for child in descendants(daemon.pid))]
        if self.ours and ray.is_initialized():
            self.disconnect()
        end_remaining(processes)

    def disconnect(self) -> None:
        # Ray's shutdown waits a second for each daemon that ignores SIGTERM, so a thread kills the daemons meanwhile.

        def kill_daemons() -> None:
            while ray.is_initialized():
                time.sleep(_POLL_SECONDS)
            kill_trees(lambda: [daemon for daemon in self.daemons if alive(daemon)])

        killer = Thread(target=kill_daemons, name="end of the cluster", daemon=True)
        killer.start()
        ray.shutdown()
        killer.join(GRACE_SECONDS)


def end_remaining(processes: Sequence[psutil.Process]) -> None:
    for process in kill_remaining(processes, grace=GRACE_SECONDS):
        log.warning("killed process %d, which outlived its cluster by %g s", process.pid, GRACE_SECONDS)


def _connect(pools: Sequence[PoolSpec], address: str | None) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    common: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "job_config": job_config(import_path()),
    }
    if address is None:
        # By default Ray starts workers at nice 15; any other process on the machine would then slow them down.
        os.environ.setdefault("RAY_worker_niceness", "0")
        cpus, custom = own_cluster(pools, os.cpu_count() or 1)
        ray.init("local", num_cpus=cpus, resources=custom, include_dashboard=False, **common)
    else:
        check_reachable(os.environ.get("RAY_ADDRESS", address) if address == "auto" else address)
        try:
            ray.init(address, **common)
        except Exception as error:
            if (refusal := token_refusal(error, address)) is None:
                raise
            raise ResourcesMissing(refusal) from error
    keep_terminal_clear()


def import_path() -> list[str]:
    """Returns the folders of this process's import path that a fresh interpreter lacks; workers need them, too."""
    standard = {os.path.realpath(path) for path in sysconfig.get_paths().values()}
    standard |= {os.path.join(path, "lib-dynload") for path in standard}
    folders = [os.path.realpath(path or os.getcwd()) for path in sys.path]
    return [path for path in dict.fromkeys(folders) if os.path.isdir(path) and path not in standard]


def check_reachable(address: str) -> None:
    """Raises ResourcesMissing if nothing listens at `host:port`; Ray would try for minutes and ignore signals."""
    host, _, port = address.rpartition(":")
    if "/" in address or not (host and port.isdigit()):
        return  # "auto" or "ray://…": only Ray can resolve these.
    if (why := unreachable(host.strip("[]"), int(port), _REACH_SECONDS)) is not None:
        raise ResourcesMissing(
            f"no Ray cluster answers at the address {address} ({why}): start one with `ray start --head` and take the "
            "address that it prints, or leave the address out for a cluster of this machine"
        )


def token_refusal(error: Exception, address: str) -> str | None:
    """Returns a sentence with advice if the error means that the cluster wanted another token, else None."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    if not any("InvalidAuthToken" in str(one) or type(one).__name__ == "AuthenticationError" for one in causes):
        return None
    return (
        f"the Ray cluster at {address} asks for its token, and this process has none or another one: every node needs "
        "the file ~/.ray/auth_token of its head node (`ray get-auth-token --generate` makes one) and "
        f"`export {MODE}=token` before `ray start` and before the run; {MODE}=disabled on all of them does without"
    )


class RaySession:
    def __init__(self, pools: Sequence[PoolSpec], connection: RayConnection) -> None:
        self._pools = pools
        self._connection = connection
        self._placement_groups: list[PlacementGroup] = []
        self._groups: dict[str, RayGroup] = {}
        self._headless = False

    async def start(self, *, start_deadline: float, log_dir: Path | None, store_bytes: int) -> dict[str, WorkerGroup]:
        """Reserves the seats of all pools, builds their workers, and returns pool name → pool; raises as `cluster`."""
        nodes = living_resources()
        exists = totals(nodes)
        check_store(store_bytes, nodes)
        reservations = reserve(self._pools, exists)
        check_fits(reservations, nodes)
        reserved = await self._take(reservations, nodes, start_deadline)
        for spec in self._pools:
            seats, seated = None, [reserved[spec.name, index] for index in range(spec.least)]
            if spec.elastic:
                seats = Seats(needs_of(spec, exists), spec.most, self._placement_groups)
                seated = [seats.adopt(seat.group) for seat in seated] + await seats.available(START_SECONDS)
            self._groups[spec.name] = RayGroup(
                spec, seated, start_deadline=start_deadline, log_dir=log_dir, seats=seats
            )
        await together(*(group.start() for group in self._groups.values()))
        return {**self._groups}

    async def watch(self) -> NoReturn:
        """Raises HeadLost when the cluster's head is lost; never returns. `close` then asks nothing of Ray any more."""
        try:
            await watch_address(*head(), DRIVER_SHARE_OF_PATIENCE * ray_patience())
        except HeadLost:
            self._headless = True
            raise

    def close(self) -> None:
        """Kills the workers, gives back the reservations, ends a cluster started here; blocks for some seconds."""
        # It awaits nothing, so no cancellation can interrupt it. If the head is lost, Ray would block for long; then
        # only the processes on this machine are killed, and workers on other nodes end themselves (head_watchdog.py).
        ours = self._processes()
        if self._headless:
            for process in ours:
                kill(process)
        elif ray.is_initialized():
            for group in self._groups.values():
                group.kill()
            for reserved in self._placement_groups:
                remove_placement_group(reserved)
            if self._connection.ours:
                self._connection.disconnect()
        end_remaining(ours)

    def _processes(self) -> list[psutil.Process]:
        workers = [worker for group in self._groups.values() for worker in group.processes()]
        roots = [process for process in [*self._connection.daemons, *workers] if alive(process)]
        return roots + [process for root in roots for process in descendants(root.pid)]

    async def _take(
        self, reservations: Sequence[Reservation], nodes: Sequence[Resources], seconds: float
    ) -> dict[tuple[str, int], ReservedSeat]:
        # In order, so that earlier reservations are served first.
        # Returns (pool, index) → seat.
        reserved: dict[tuple[str, int], ReservedSeat] = {}
        pending: list[PlacementGroup] = []
        try:
            async with asyncio.timeout(seconds):
                for reservation in reservations:
                    group = await self._reserve(reservation)
                    pending.append(group)
                    if len(reservation.bundles) > 1:
                        await _created(group)
                        _log_spread(reservation, nodes_of(group), nodes)
                    for index, bundle in reservation.seats.items():
                        reserved[reservation.pool, index] = ReservedSeat(group, bundle, reservation.share)
                for group in pending:
                    await _created(group)
        except TimeoutError as error:
            free = ray.available_resources()
            headline = f"the cluster did not free what was asked within {seconds:g} s"
            text = shortage(reservations, nodes, headline, free=lambda name: free.get(name, 0.0))
            raise ResourcesMissing(text) from error
        return reserved

    async def _reserve(self, reservation: Reservation) -> PlacementGroup:
        # A placement group on one node if one has room now, otherwise on few. If another user takes the room meanwhile,
        # the request for one node is replaced after ONE_NODE_SECONDS. Bundles that must be on different nodes are
        # requested once.
        several = len(reservation.bundles) > 1 and not reservation.apart
        first = packing(reservation, free_by_node()) if several else PACK
        for strategy in (STRICT_SPREAD,) if reservation.apart else dict.fromkeys((first, PACK)):
            group = placement_group([dict(bundle) for bundle in reservation.bundles], strategy=strategy)
            self._placement_groups.append(group)
            if strategy != STRICT_PACK:
                break
            with suppress(TimeoutError):
                await asyncio.wait_for(_created(group), ONE_NODE_SECONDS)
                break
            remove_placement_group(group)
            self._placement_groups.remove(group)
        return group


def _log_spread(reservation: Reservation, of_bundles: Sequence[str], nodes: Sequence[Resources]) -> None:
    spread = describe_spread(reservation, of_bundles)
    if not reservation.apart and len(set(of_bundles)) > 1 and packing(reservation, nodes) == STRICT_PACK:
        log.warning("%s, as others hold what one node would need: whatever its workers exchange is slower", spread)
    else:
        log.info("%s", spread)


async def _created(group: PlacementGroup) -> None:
    while placement_group_table(group)["state"] != "CREATED":  # noqa: ASYNC110
        await asyncio.sleep(_POLL_SECONDS)


def wait_for_nodes(address: str, count: int, seconds: float) -> int:
    """Returns the number of nodes of the cluster at `address`: as soon as there are `count`, or after `seconds`.

    Raises as RayConnection if no cluster answers there until then.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            connection = RayConnection([], address)
            break
        except (ResourcesMissing, ConnectionError):
            if time.monotonic() > until:
                raise
            time.sleep(_POLL_SECONDS)
    try:
        while (found := len(living_resources())) < count and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        return found
    finally:
        connection.close()


def living_resources() -> list[Resources]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def nodes_of(group: PlacementGroup) -> list[str]:
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    placed: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return [f"{address[node]} {node[:6]}" for _, node in sorted(placed.items())]
