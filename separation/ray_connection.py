"""RayConnection joins a Ray cluster or starts one on this machine, and leaves or ends it again.

ray_session.py builds the workers of a run on it; early_cluster.py starts a cluster before the run is prepared.
"""

import json
import logging
import os
import sys
import sysconfig
import time
from collections.abc import Sequence
from threading import Thread
from typing import Any

import psutil
import ray
from ray._private import worker as ray_worker
from ray._private.accelerators import get_accelerator_manager_for_resource
from ray._private.ray_constants import RESOURCES_ENVIRONMENT_VARIABLE
from ray.job_config import JobConfig

from separation.group import PoolSpec
from separation.placement import own_cluster
from separation.processes import descendants, kill, kill_new, kill_remaining
from separation.ray_head import start_with_what_runs
from separation.ray_join import join
from separation.signals import ctrl_c_ignored, sigterm_ours_alone

log = logging.getLogger(__name__)

GRACE_SECONDS = 5.0
"""Time for which remaining processes may live on before they are killed."""
_POLL_SECONDS = 0.02
LEAN = {
    "task_events_report_interval_ms": 0,
    "enable_metrics_collection": False,
    "event_stats": False,
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
}
"""Settings of Ray for a cluster that is started here. Its task history, metrics and statistics of handlers are off,
because nothing reads them, and so are workers that it starts ahead."""
AHEAD = {"prestart_worker_first_driver": True, "idle_worker_killing_time_threshold_ms": 60_000}
"""Settings for the cluster of a run: when the driver has connected, Ray starts as many workers as there are logical
CPUs, but no more than the machine has cores. They become the first workers of the pools; meanwhile the driver imports.
They must outlast the time in which the pools have reserved all CPUs and have no workers yet."""


class RayConnection:
    """The connection of this process to a Ray cluster, and the daemons of a cluster that was started for it."""

    def __init__(self, pools: Sequence[PoolSpec], address: str | None, *, meanwhile: Thread | None = None) -> None:
        """Joins the cluster at `address`, or starts one on this machine for the pools if it is None.

        `meanwhile` is a thread that is started when all daemons of a cluster that is started here have been launched,
        while they get ready. If this process is connected to Ray already, that connection is used. Raises
        ResourcesMissing if the cluster cannot be joined, or if this machine is too small for the pools. If it raises
        anything, no process that it started is left.
        """
        self.ours = not ray.is_initialized()
        """True if the connection was made here, so that `disconnect` may end it."""
        self.daemons: list[psutil.Process] = []
        if self.ours:
            before = descendants(os.getpid())
            try:
                with sigterm_ours_alone():
                    _connect(pools, address, meanwhile)
            except BaseException:  # Also Ctrl-C: Ray would leave the processes that it was starting.
                with ctrl_c_ignored():
                    if ray.is_initialized():
                        ray.shutdown()
                    kill_remaining(kill_new(before), grace=GRACE_SECONDS)
                raise
            self.daemons = [process for process in descendants(os.getpid()) if process not in before]

    def close(self) -> None:
        """Ends the connection and everything that was started for it; blocks for up to some seconds."""
        processes = [*self.daemons, *(child for daemon in self.daemons for child in descendants(daemon.pid))]
        if self.ours and ray.is_initialized():
            self.disconnect()
        end_remaining(processes)

    def disconnect(self) -> None:
        """Leaves the cluster, and ends it if it was started here.

        Ray's shutdown waits a second for each daemon that ignores SIGTERM, so a thread kills the daemons meanwhile.
        """

        def kill_daemons() -> None:
            while ray.is_initialized():
                time.sleep(_POLL_SECONDS)
            for daemon in self.daemons:
                kill(daemon)

        killer = Thread(target=kill_daemons, name="end of the cluster", daemon=True)
        killer.start()
        ray.shutdown()
        killer.join(GRACE_SECONDS)


def end_remaining(processes: Sequence[psutil.Process]) -> None:
    """Kills the processes that outlive their cluster by GRACE_SECONDS; logs a warning for each."""
    for process in kill_remaining(processes, grace=GRACE_SECONDS):
        log.warning("killed process %d, which outlived its cluster by %g s", process.pid, GRACE_SECONDS)


def _connect(pools: Sequence[PoolSpec], address: str | None, meanwhile: Thread | None) -> None:
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
        cpus, custom = own_cluster(pools, os.cpu_count() or 1)
        own: dict[str, Any] = {"num_cpus": cpus, "resources": custom, "include_dashboard": False}
        own["_system_config"] = LEAN | AHEAD
        start_with_what_runs(lambda: ray.init("local", **own, **common), meanwhile)
    else:
        join(address, **common)
    _log_raylet_messages()


def _log_raylet_messages() -> None:
    """Logs the raylet's messages on dead workers, which Ray would print into this process's terminal display."""
    if hasattr(ray_worker, "print_to_stdstream"):
        ray_worker.print_to_stdstream = lambda batch, *_, **__: log.info("raylet: %s", " ".join(batch["lines"]))


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


def import_path() -> list[str]:
    """Returns the folders of this process's import path that a fresh interpreter lacks; workers need them, too."""
    standard = {os.path.realpath(path) for path in sysconfig.get_paths().values()}
    standard |= {os.path.join(path, "lib-dynload") for path in standard}
    folders = [os.path.realpath(path or os.getcwd()) for path in sys.path]
    return [path for path in dict.fromkeys(folders) if os.path.isdir(path) and path not in standard]
