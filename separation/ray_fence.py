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
from contextlib import suppress

import ray

from separation.processes import descendants, kill
from separation.ray_group import node_address
from separation.ray_watch import FEWEST_FAILURES, ray_patience

SHARE = 0.8
"""Of the time after which Ray gives a head up: later than the driver does, which then says so, and sooner than Ray."""
ATTEMPT, PAUSE = 1 / 8, 1 / 16
"""Of the time that the head may be out of reach: the limit of an attempt to connect, and the pause after it."""
LAST_WORDS_SECONDS = 2.0


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
    """Connects to an address again and again; calls `give_up` when that has failed for `seconds`, and returns.

    They count from the first attempt that failed. An attempt is short, since TCP asks again after ever longer pauses:
    one long attempt would miss a cable that was put back. A few must have failed, so that a process that was itself
    stopped for a while asks again.
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
    """Ends this process, and those that it has started, at once, whatever its other threads wait for.

    Its log says why where that can be written: the disk may be full, or on the other side of the cable.
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
    """Writes a line to the log; what the disk refuses is not said."""
    with suppress(OSError):
        sys.stderr.write(f"{why}\n")
        sys.stderr.flush()
