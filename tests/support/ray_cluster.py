"""Starts Ray clusters for tests as a run starts its own: without Ray's processes and workers that nobody uses."""

import logging
from typing import Any

import ray
from ray.job_config import JobConfig

from separation.ray_connection import LEAN, import_path
from separation.ray_head import start_with_what_runs


def start_ray(*, num_cpus: int = 8, **machine: Any) -> None:
    """Starts a cluster on this machine and connects this process; its workers find what this process imports.

    `machine` is what `ray.init` takes, such as `resources`. Raises what `ray.init` raises.
    """
    options: dict[str, Any] = {
        "num_cpus": num_cpus,
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "job_config": JobConfig(_py_driver_sys_path=import_path()[::-1]),
        **machine,
    }
    start_with_what_runs(lambda: ray.init("local", _system_config=dict(LEAN), **options))
