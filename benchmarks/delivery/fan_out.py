"""Measures the bytes that leave the sender's node when receivers are on many nodes.

Usage: python -m benchmarks.delivery.fan_out, on a Ray cluster. The sender is on one node, and each receiver on
a node of its own. The kernel's counters of the sender's network interfaces give the bytes, with protocol overhead.
"""

import argparse
import asyncio
import json
import sys
from typing import Any

import ray

from benchmarks.delivery.measure import WARM_UP_PUBLISHES, rig
from checkpoint_engine.transports import GLOO, OBJECT_STORE

RECEIVERS = (1, 2, 4, 8)


async def sent(transport: str, megabytes: float, nodes: list[str], *, publishes: int) -> dict[str, Any]:
    """Returns one result as plain JSON: `copies` of the payload leave `nodes[0]` per publish, for the other nodes."""
    async with rig(transport, megabytes, len(nodes) - 1, nodes) as made:
        for version in range(WARM_UP_PUBLISHES):
            await made.publish(version)
        before = await made.sender.call("bytes_sent")
        for version in range(WARM_UP_PUBLISHES, WARM_UP_PUBLISHES + publishes):
            await made.publish(version)
        total = (await made.sender.call("bytes_sent") - before) / publishes
        return {
            "transport": transport,
            "megabytes": megabytes,
            "receivers": len(nodes) - 1,
            "sent_megabytes": round(total / 1e6, 2),
            "copies": round(total / (megabytes * 1e6), 2),
            "fallbacks": made.delivery.stats.fallbacks,
            "member_busy": made.delivery.stats.member_busy,
        }


def main() -> int:
    """Prints one line of JSON per transport and number of receivers. The exit code is 2 with too few nodes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="auto", help="of the Ray cluster")
    parser.add_argument("--megabytes", type=float, default=50.0)
    parser.add_argument("--publishes", type=int, default=3)
    parser.add_argument("--transports", default=f"{OBJECT_STORE},{GLOO}")
    parser.add_argument("--sender", help="address of the sender's node (default: the first by address)")
    given = parser.parse_args()
    ray.init(address=given.address, log_to_driver=False)
    driver = ray.util.get_node_ip_address()
    others = sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])
    others = [address for address in others if address != driver]
    if given.sender in others:
        others.insert(0, others.pop(others.index(given.sender)))
    counts = [count for count in RECEIVERS if count < len(others)]
    if not counts:
        sys.stderr.write(f"fan_out: needs two nodes beside this one, and the cluster has {len(others)}\n")
        return 2
    for transport in given.transports.split(","):
        for count in counts:
            row = asyncio.run(sent(transport, given.megabytes, others[: count + 1], publishes=given.publishes))
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
