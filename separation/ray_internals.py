"""Every use of Ray's private modules in this project; tested with Ray 2.50 and 2.60."""

import json
import math
import os
import time
from collections.abc import Sequence

import ray
from ray._private import worker as driver
from ray._private.accelerators import get_accelerator_manager_for_resource
from ray._private.ray_constants import RESOURCES_ENVIRONMENT_VARIABLE
from ray._private.state import available_resources_per_node, state
from ray.job_config import JobConfig

from separation.resources import Resources


def draining() -> dict[str, float]:
    """Returns node id → seconds until the node ends, infinity without a deadline; asks the head, and waits."""
    # `ray drain-node`, KubeRay and Ray's autoscaler send a notice before they end a node. Its deadline is a time of day
    # on the clock of whoever sent it.
    now = time.time()
    deadlines: dict[str, int] = state.get_draining_nodes()
    return {node: max(0.0, at / 1000 - now) if at else math.inf for node, at in deadlines.items()}


def free_by_node() -> list[Resources]:
    """Returns the free resources of each living node; all that it has, before its first report."""
    free = available_resources_per_node()
    return [free.get(node["NodeID"], node["Resources"]) for node in ray.nodes() if node["Alive"]]


def gpus_here() -> float:
    """Returns the number of GPUs that a cluster started on this machine would have, by Ray's count, without CUDA."""
    if "GPU" in (resources := json.loads(os.environ.get(RESOURCES_ENVIRONMENT_VARIABLE, "{}"))):
        return float(resources["GPU"])
    if (manager := get_accelerator_manager_for_resource("GPU")) is None:
        return 0.0
    count, visible = (
        manager.get_current_node_num_accelerators(),
        manager.get_current_process_visible_accelerator_ids(),
    )
    return float(count if visible is None else min(count, len(visible)))


def job_config(folders: Sequence[str]) -> JobConfig:
    """Returns the settings of a job whose workers search `folders` for modules, in this order, before all others."""
    # Ray inserts the folders one by one at the front of a worker's sys.path, so the first has to come last.
    return JobConfig(_py_driver_sys_path=list(folders)[::-1])


def keep_terminal_clear() -> None:
    """Makes Ray print no messages on dead workers into this process's terminal display; `log_to_driver` leaves them."""
    driver._worker_logs_enabled = False
