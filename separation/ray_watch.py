"""The driver's watch of the head of a Ray cluster that it has joined: HeadLost is raised before Ray ends this process.

Without an answer from the head, Ray ends every process of the cluster after a minute, without a chance to clean up.
ray_session.py runs `watch_head`; the fence of the workers (ray_fence.py) also starts from Ray's limit.
"""

import asyncio
import os
from typing import NoReturn

import ray

PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Environment variable of Ray: seconds after which a process of the cluster that cannot reach the head ends itself."""
RAY_PATIENCE_SECONDS = 60.0
"""Ray's default for this time."""
DRIVER_SHARE_OF_PATIENCE = 0.6
"""Part of this time after which the head counts as lost. A network that is soon back is tolerated, and enough time is
left for an orderly end."""
FEWEST_FAILURES = 4
"""Number of attempts in a row that must fail before a head counts as out of reach."""
_POLL_SECONDS = 2.0


class HeadLost(RuntimeError):
    """Raised if the node with Ray's head cannot be reached any more; nothing can then be started or ended."""


def patience() -> float:
    """Returns the seconds for which a head may be out of reach before a run counts it as lost."""
    return DRIVER_SHARE_OF_PATIENCE * ray_patience()


def ray_patience() -> float:
    """Returns the seconds after which Ray's own processes give a head up."""
    try:
        return float(os.environ.get(PATIENCE, RAY_PATIENCE_SECONDS))
    except ValueError:
        return RAY_PATIENCE_SECONDS


async def watch_head() -> NoReturn:
    """Watches the head of this process's cluster; raises HeadLost after `patience()` seconds without an answer."""
    address: str = ray.get_runtime_context().gcs_address
    host, _, port = address.rpartition(":")
    await watch_address(host.strip("[]"), int(port), patience())


async def watch_address(host: str, port: int, seconds: float) -> NoReturn:
    """Connects to the address again and again; raises HeadLost when this has failed for `seconds`.

    The seconds count from the first of the failed attempts, and at least FEWEST_FAILURES attempts must fail in a row:
    otherwise a process that was itself stopped for a while would give up after its first attempt. Attempts are short,
    because TCP repeats its requests after longer and longer pauses, so one long attempt could miss a network that is
    back.
    """
    loop = asyncio.get_running_loop()
    failures, failing_since = 0, 0.0
    while True:
        began = loop.time()
        try:
            async with asyncio.timeout(seconds / 6):
                _, writer = await asyncio.open_connection(host, port)
            writer.close()
            failures = 0
        except OSError as error:  # a TimeoutError is one
            failing_since = failing_since if failures else began
            failures += 1
            if failures >= FEWEST_FAILURES and loop.time() - failing_since >= seconds:
                why = str(error) or "no answer"
                raise HeadLost(
                    f"Ray's head node {host}:{port} was out of reach for {seconds:g} s ({why}), and with it goes the "
                    "cluster: start Ray again, then go on with resume=auto"
                ) from error
        await asyncio.sleep(min(_POLL_SECONDS, seconds / 4))
