"""Notices that a node is about to end, as Ray has them: the only file that knows where.

`ray drain-node`, KubeRay and Ray's autoscaler send them before they end a node: spot instances, scaling down. Ray gives
a draining node nothing new, and its raylet ends by itself when nothing is left on it.
"""

import math
import time

from ray._private.state import state


def draining() -> dict[str, float]:
    """Node id → seconds until the node ends, infinity where the notice has no deadline. Asks the head, and waits.

    A deadline is a time of day on the clock of whoever asked for the drain, so it is as good as the clocks agree.
    """
    now = time.time()
    deadlines: dict[str, int] = state.get_draining_nodes()
    return {node: max(0.0, at / 1000 - now) if at else math.inf for node, at in deadlines.items()}
