"""Trains on three Ray nodes that all run on this machine: the trainer on one, a rollout worker on each of the others.

python examples/several_nodes/pretend.py [key=value ...]

Then it trains the same steps on one node and compares the digests of the weights, which must be equal; exit code 1 if
they differ. Each node has its own object store, so images and weights travel between stores as in a cluster. Different
machines, networks and GPUs are not imitated.
"""

import json
import subprocess
import sys
from pathlib import Path

from ray.cluster_utils import Cluster

STORE = 100_000_000
"""Size of each node's object store in bytes."""


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
    """Arguments with which Ray starts a node; `seats` are its places for workers, by pool, used without a GPU."""
    return {"num_cpus": 4, "resources": seats, "object_store_memory": STORE}


def train(name: str, *overrides: str) -> str:
    """Makes one run in a process of its own and returns the digest of its weights; CalledProcessError if it fails."""
    folder = Path("outputs") / name
    words = ["--config-name", "one_step_off", "total_steps=4", f"output_dir={folder}", *overrides, *sys.argv[1:]]
    subprocess.run([sys.executable, "-m", "async_flowrl.main", *words], check=True)
    return str(json.loads((folder / "summary.json").read_text())["weights_digest"])


if __name__ == "__main__":
    sys.exit(main())
