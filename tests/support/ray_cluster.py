"""Starts Ray clusters for tests as a run starts its own."""

import logging
import socket
import time
from typing import Any

import ray

from separation.ray_cluster import import_path
from separation.ray_internals import job_config
from tests.support.forked_workers import forked_workers


def start_ray(*, num_cpus: int = 8, **machine: Any) -> None:
    """Starts a cluster on this machine and connects this process; its workers find what this process imports.

    They are forked (forked_workers.py). `machine` is what `ray.init` takes, such as `resources`. Raises what `ray.init`
    raises.
    """
    options: dict[str, Any] = {
        "num_cpus": num_cpus,
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "job_config": job_config(import_path()),
        **machine,
    }
    with forked_workers():
        ray.init("local", **options)


def all_free(patience: float = 10.0) -> bool:
    """Whether this process is connected to a cluster none of whose CPUs and devices is taken.

    Waits up to `patience` seconds for it, since Ray counts what ended actors had a little later. A dead cluster
    is not free.
    """
    deadline = time.monotonic() + patience
    while ray.is_initialized() and _answers():
        whole, free = ray.cluster_resources(), ray.available_resources()
        if "CPU" in whole and all(free.get(name, 0.0) == amount for name, amount in whole.items() if _counted(name)):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return False


def _answers() -> bool:
    """Whether the cluster's store is there. Asked through Ray, a dead one is waited for, and ends this process."""
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except OSError:
        return False
    return True


def _counted(name: str) -> bool:
    """Whether a resource is one of those that workers take: memory is counted by bytes, and node names mark places."""
    return "memory" not in name and not name.startswith("node:")
