"""Three Ray nodes on this machine: the trainer on one, a rollout worker on each of the others, as a cluster has them.

python examples/several_nodes/pretend.py [key=value ...]

Then the same steps on one node, and both digests: where workers sit changes nothing. Each node has an object store of
its own, so images and weights really travel between stores; machines, networks and GPUs are what it cannot pretend.
"""

import json
import subprocess
import sys
from pathlib import Path

from ray.cluster_utils import Cluster

STORE = 100_000_000
"""Bytes of each node's object store."""


def main() -> int:
    cluster = Cluster(initialize_head=True, head_node_args=node(trainer=1))
    try:
        cluster.add_node(**node(rollout=1))
        cluster.add_node(**node(rollout=1))
        spread = train("three_nodes", f"runtime.address={cluster.address}", "rollout.num_workers=2")
    finally:
        cluster.shutdown()
    together = train("one_node")
    print(f"three nodes {spread[:12]}, one node {together[:12]}: {'equal' if spread == together else 'DIFFERENT'}")
    return int(spread != together)


def node(**seats: int) -> dict[str, object]:
    """What Ray starts a node with; `seats` are workers of a pool that may sit there, where there is no GPU."""
    return {"num_cpus": 4, "resources": seats, "object_store_memory": STORE}


def train(name: str, *overrides: str) -> str:
    """One run, by the command line; returns the digest of its weights. Raises CalledProcessError where it fails."""
    folder = Path("outputs") / name
    words = ["--config-name", "one_step_off", "total_steps=4", f"output_dir={folder}", *overrides, *sys.argv[1:]]
    subprocess.run([sys.executable, "-m", "async_flowrl.main", *words], check=True)
    return str(json.loads((folder / "summary.json").read_text())["weights_digest"])


if __name__ == "__main__":
    sys.exit(main())
