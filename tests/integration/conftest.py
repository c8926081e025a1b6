"""Integration tests run the real engine on the tiny model, offline."""

import logging
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def single_threaded_and_quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One torch thread, nobody else's cluster, and the root logger as it was: a run configures it for its own log."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    root, threads = logging.getLogger(), torch.get_num_threads()
    handlers, level = list(root.handlers), root.level
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
        handler.close()
    for handler in set(handlers) - set(root.handlers):
        root.addHandler(handler)
    root.setLevel(level)


@pytest.fixture
def existing_cluster() -> Iterator[str]:
    """Address of a Ray cluster of four CPUs, one trainer and two rollout devices, that somebody else started."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 4,
            "resources": {"trainer": 1, "rollout": 2},
            "object_store_memory": 100_000_000,
            "include_dashboard": False,
        },
    )
    try:
        yield str(cluster.address)
    finally:
        cluster.shutdown()
        ray.shutdown()


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    """This process connected to a Ray cluster with room for two trainer ranks and two rollout workers."""
    import ray
    from ray.job_config import JobConfig

    from separation.ray_session import import_path

    ray.init(
        address="local",
        num_cpus=8,
        resources={"trainer": 2, "rollout": 2},
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        job_config=JobConfig(_py_driver_sys_path=import_path()),
    )
    try:
        yield
    finally:
        ray.shutdown()
