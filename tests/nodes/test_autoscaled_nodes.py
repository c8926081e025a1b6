"""Test of Ray's autoscaler, which starts a node for a missing rollout worker; the weights are those of one node.

The nodes come from the provider that the Ray wheel ships for tests: raylets beside the head's, on the same machine.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.nodes.node_runs import start
from tests.nodes.pretended_nodes import NETWORK, PORT, Nodes

pytestmark = [pytest.mark.nodes, pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(1800)]

STEPS = 10
LIMIT = 900.0
HEAD: dict[str, float] = {"trainer": 1, "rollout": 1}
FAKE = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
UNHURRIED = ("disturb.generate=10", "disturb.constant=true")
"""A pause of ten seconds before each ticket, so that the run is still going on when the new node has started."""
EMPTY = {"auth": {}, "docker": {}, "file_mounts": {}, "file_mounts_sync_continuously": False} | {
    f"{which}_commands": []
    for which in ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
}


def cluster(most: int) -> dict[str, Any]:
    """Returns a cluster file: a head, and up to `most` nodes with a seat for a rollout worker, started on demand."""
    seat = {"CPU": 2, "rollout": 1, "object_store_memory": 100_000_000}
    return EMPTY | {
        "cluster_name": "on_demand",
        "max_workers": most,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 60,
        "cluster_synced_files": [],
        "rsync_exclude": [],
        "rsync_filter": [],
        "provider": {
            "type": "fake_multinode",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "gcs_address": f"{NETWORK}.1:{PORT}",
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 6, **HEAD}, "node_config": {}, "max_workers": 0},
            "on.demand": {"resources": seat, "node_config": {}, "min_workers": 0, "max_workers": most},
        },
    }


def test_a_missing_worker_has_the_autoscaler_start_a_node_and_joins_from_there(
    allowed: None, tmp_path: Path, one_node_digest: Callable[[int], str]
) -> None:
    described = tmp_path / "cluster.json"
    described.write_text(json.dumps(cluster(2)))
    with Nodes(tmp_path / "nodes", []) as nodes:
        head = nodes.add(
            HEAD,
            shm="400m",
            environment=FAKE,
            ray_options=(f"--autoscaling-config={described}",),
            store_bytes=90_000_000,
        )
        head.start_ray()
        assert len(head.processes("raylet")) == 1
        pool = ("rollout.num_workers=1", "rollout.min_workers=1", "rollout.max_workers=2")
        run = start(head, tmp_path / "run", f"total_steps={STEPS}", *pool, *UNHURRIED)
        run.wait_for(
            lambda: any(e["event"] == "worker_joined" for e in run.events), "a worker of a node that was started", LIMIT
        )
        assert len(head.processes("raylet")) > 1, "Ray may start another one while the first is on its way"
        run.finish(seconds=LIMIT)
    (joined,) = [event for event in run.events if event["event"] == "worker_joined"]
    assert (joined["worker"], joined["workers"]) == ("rollout-1", 2)
    made = {e["worker"] for e in run.events if e["event"] == "ticket" and e["state"] == "SCORING"}
    assert made == {"rollout-0", "rollout-1"}
    assert run.digest == one_node_digest(STEPS)
    assert len(run.trained) == len(set(run.trained))
