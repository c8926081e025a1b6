"""The fence of a worker process: the process ends itself when it has not reached its Ray cluster's head for a while.

If a node is cut off from the network, the head gives it up after its health checks, and other workers take over its
work. The cut-off node's own Ray processes notice this much later, so each worker watches the head itself; otherwise two
workers would compute and write the same. ray_group.py starts the fence on clusters of several nodes.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import ray

from separation.processes import descendants, kill
from separation.ray_group import node_address
from separation.ray_watch import FEWEST_FAILURES, ray_patience

FENCE_SHARE_OF_PATIENCE = 0.8
"""A worker ends itself when the head has been out of reach for this part of Ray's patience (`ray_patience`). The part
is larger than the driver's (ray_watch.py), so that the driver ends the run first and says why."""
ATTEMPT, PAUSE = 1 / 8, 1 / 16
"""Time-out of an attempt to connect, and pause after it, as parts of the time for which the head may be out of
reach."""
LAST_WORDS_SECONDS = 2.0
"""Time limit for writing the reason to the log before the process ends."""


def settle_in(fenced: bool) -> str:
    """Returns the IP address of this node; it runs in a worker before the worker's object is built.

    With `fenced`, it also starts the thread that ends this process when the cluster's head cannot be reached.
    """
    if fenced:
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        seconds = FENCE_SHARE_OF_PATIENCE * ray_patience()
        watch = threading.Thread(
            target=keep_in_touch, args=(host.strip("[]"), int(port), seconds, end), name="fence", daemon=True
        )
        watch.start()
    return node_address()


def keep_in_touch(host: str, port: int, seconds: float, give_up: Callable[[str], None]) -> None:
    """Connects to the address again and again; when this has failed for `seconds`, it calls `give_up` and returns.

    The seconds count from the first of the failed attempts, and at least FEWEST_FAILURES attempts must fail in a row:
    otherwise a process that was itself stopped for a while would give up after its first attempt. Attempts are short,
    because TCP repeats its requests after longer and longer pauses, so one long attempt could miss a network that is
    back.
    """
    failures, failing_since = 0, 0.0
    while True:
        began = time.monotonic()
        why = unreachable(host, port, ATTEMPT * seconds)
        if why is None:
            failures = 0
        else:
            failing_since = failing_since if failures else began
            failures += 1
            if failures >= FEWEST_FAILURES and time.monotonic() - failing_since >= seconds:
                give_up(f"Ray's head {host}:{port} was out of reach for {seconds:g} s ({why}): this worker ends itself")
                return
        time.sleep(PAUSE * seconds)


def unreachable(host: str, port: int, seconds: float) -> str | None:
    """Returns why no connection came about within the time; None if one did."""
    try:
        socket.create_connection((host, port), seconds).close()
    except OSError as error:
        return str(error) or type(error).__name__
    return None


def end(why: str) -> None:
    """Ends this process and the processes that it has started at once, even if other threads of it are blocked.

    The reason is written to the log first, in a thread with a time limit, because the disk may be full or unreachable.
    """
    try:
        telling = threading.Thread(target=tell, args=(why,), name="last words", daemon=True)
        telling.start()
        telling.join(LAST_WORDS_SECONDS)
        for process in descendants(os.getpid()):
            kill(process)
    finally:
        os._exit(1)


def tell(why: str) -> None:
    """Writes a line to the log; an error of the disk is ignored, because the process ends anyway."""
    with suppress(OSError):
        sys.stderr.write(f"{why}\n")
        sys.stderr.flush()
