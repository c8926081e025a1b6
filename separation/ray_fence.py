"""A worker's own end where Ray's head can't be reached: whoever is cut off computes and writes nothing any more.

The head gives a silent node up after its health checks, and others take over its work. The raylet on the other side of
the cable notices much later, and so would its workers. So each watches the head by itself.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable

import ray

from separation.ray_group import node_address
from separation.ray_watch import ray_patience

SHARE = 0.8
"""Of the time after which Ray gives a head up: later than the driver does, which then says so, and sooner than Ray."""


def settle_in(fenced: bool) -> str:
    """Runs in a worker before anything is built: returns the IP address of its node. `fenced`: it ends by itself when
    the cluster's head can't be reached."""
    if fenced:
        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        seconds = SHARE * ray_patience()
        watch = threading.Thread(
            target=keep_in_touch, args=(host.strip("[]"), int(port), seconds, end), name="fence", daemon=True
        )
        watch.start()
    return node_address()


def keep_in_touch(host: str, port: int, seconds: float, give_up: Callable[[str], None]) -> None:
    """Connects to an address four times in `seconds`; calls `give_up` when that has failed for `seconds`, and returns.

    They count from the first attempt that failed, so a process that was itself stopped for a while asks again.
    """
    failing_since: float | None = None
    while True:
        began = time.monotonic()
        why = unreachable(host, port, seconds)
        if why is None:
            failing_since = None
        else:
            failing_since = began if failing_since is None else failing_since
            if time.monotonic() - failing_since >= seconds:
                give_up(f"Ray's head {host}:{port} was out of reach for {seconds:g} s ({why}): this worker ends itself")
                return
        time.sleep(seconds / 4)


def unreachable(host: str, port: int, seconds: float) -> str | None:
    """Returns why no connection came about within the time; None if one did."""
    try:
        socket.create_connection((host, port), seconds).close()
    except OSError as error:
        return str(error) or type(error).__name__
    return None


def end(why: str) -> None:
    """Ends this process at once, whatever its other threads wait for; its log says why."""
    sys.stderr.write(f"{why}\n")
    sys.stderr.flush()
    os._exit(1)
