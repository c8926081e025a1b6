"""The watch of a Ray cluster's head, by the driver and by each worker process on a cluster of several nodes.

Without the head, Ray ends every process after a minute; the driver raises HeadLost before that. A worker that is cut
off ends itself, so that no two workers compute and write the same.
"""

import asyncio
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

import ray

from separation.local import Lane
from separation.processes import descendants, kill

# Environment variable of Ray: seconds after which a process of the cluster that cannot reach the head ends itself.
PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"
RAY_PATIENCE_SECONDS = 60.0  # Ray's default for this time.
# Part of this time after which the head counts as lost. A network that is soon back is tolerated, and enough time is
# left for an orderly end.
DRIVER_SHARE_OF_PATIENCE = 0.6
FEWEST_FAILURES = 4  # Number of attempts in a row that must fail before a head counts as out of reach.
# A worker ends itself when the head has been out of reach for this part of Ray's patience (`ray_patience`). The part is
# larger than the driver's, so that the driver ends the run first and says why.
FENCE_SHARE_OF_PATIENCE = 0.8
# Time-out of an attempt to connect, and pause after it, as parts of the time for which the head may be out of reach.
ATTEMPT, PAUSE = 1 / 8, 1 / 16
LAST_WORDS_SECONDS = 2.0  # Time limit for writing the reason to the log before the process ends.


class HeadLost(RuntimeError):
    """Raised if the node with Ray's head cannot be reached any more; nothing can then be started or ended."""


def ray_patience() -> float:
    """Returns the seconds after which Ray's own processes give a head up."""
    try:
        return float(os.environ.get(PATIENCE, RAY_PATIENCE_SECONDS))
    except ValueError:
        return RAY_PATIENCE_SECONDS


async def watch_address(host: str, port: int, seconds: float) -> NoReturn:
    """Raises HeadLost when the address has been out of reach for `seconds` (see `keep_in_touch`)."""
    lane, stopped = Lane("head"), threading.Event()
    try:
        why = await asyncio.get_running_loop().run_in_executor(lane, keep_in_touch, host, port, seconds, stopped)
    finally:
        stopped.set()
        lane.shutdown()
    raise HeadLost(f"{why}, and with it goes the cluster: start Ray again, then go on with resume=auto")


def head() -> tuple[str, int]:
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    return host.strip("[]"), int(port)


def settle_in(fenced: bool) -> str:
    """Returns this node's IP address before the worker's object is built; `fenced` watches the head from then on."""
    if fenced:
        watched = *head(), FENCE_SHARE_OF_PATIENCE * ray_patience()
        threading.Thread(target=lambda: end(keep_in_touch(*watched)), name="fence", daemon=True).start()
    return node_address()


def keep_in_touch(host: str, port: int, seconds: float, stopped: threading.Event | None = None) -> str:
    """Connects again and again; returns the reason when this has failed for `seconds`, or soon after `stopped`."""
    # The seconds count from the first failed attempt, and FEWEST_FAILURES attempts must fail in a row: otherwise a
    # process that was itself stopped for a while would give up after its first attempt. Attempts are short, because TCP
    # repeats its requests after longer and longer pauses, so one long attempt could miss a network that is back.
    failures, failing_since = 0, 0.0
    while stopped is None or not stopped.is_set():
        began = time.monotonic()
        why = unreachable(host, port, ATTEMPT * seconds)
        if why is None:
            failures = 0
        else:
            failing_since = failing_since if failures else began
            failures += 1
            if failures >= FEWEST_FAILURES and time.monotonic() - failing_since >= seconds:
                return f"Ray's head {host}:{port} was out of reach for {seconds:g} s ({why})"
        time.sleep(PAUSE * seconds)
    return "stopped"


def unreachable(host: str, port: int, seconds: float) -> str | None:
    try:
        socket.create_connection((host, port), seconds).close()
    except (OSError, OverflowError) as error:  # the latter for a port that no address can have
        return str(error) or type(error).__name__
    return None


def end(why: str) -> None:
    """Ends this process and the processes that it has started at once, even if other threads of it are blocked."""
    # The reason is logged first, in a thread with a time limit, because the disk may be full or unreachable.
    try:
        telling = threading.Thread(target=tell, args=(f"{why}: this worker ends itself",), daemon=True)
        telling.start()
        telling.join(LAST_WORDS_SECONDS)
        for process in descendants(os.getpid()):
            kill(process)
    finally:
        os._exit(1)


def tell(why: str) -> None:
    with suppress(OSError):
        sys.stderr.write(f"{why}\n")
        sys.stderr.flush()


def node_address() -> str:
    return str(ray.util.get_node_ip_address())
