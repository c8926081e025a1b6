"""Reader of Ray's drain notices, each of which says that a node is about to end; no other file reads them.

`ray drain-node`, KubeRay and Ray's autoscaler send a notice before they end a node, for example a spot instance or a
node that is no longer needed. Ray puts nothing new on a draining node, and its raylet ends when nothing is left there.
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
