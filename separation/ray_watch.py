"""The head of somebody else's cluster, watched: without it Ray ends this process after a minute, in the middle."""

import asyncio
import os
from typing import NoReturn

import ray

PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Ray's setting: seconds after which every process of a cluster ends itself that can't reach the head."""
RAY_PATIENCE_SECONDS = 60.0
SHARE = 0.6
"""Of that time is waited here: enough for a cable that is put back, and there is time left to end in order."""
FEWEST_FAILURES = 4
"""Attempts that must fail one after the other, however long each took, before a head counts as out of reach."""
_POLL_SECONDS = 2.0


class HeadLost(RuntimeError):
    """The node with Ray's head can't be reached any more, so that nothing can be started or ended."""


def patience() -> float:
    """Seconds that a head may be out of reach before a run counts it as lost."""
    return SHARE * ray_patience()


def ray_patience() -> float:
    """Seconds after which Ray's own processes give a head up."""
    try:
        return float(os.environ.get(PATIENCE, RAY_PATIENCE_SECONDS))
    except ValueError:
        return RAY_PATIENCE_SECONDS


async def watch_head() -> NoReturn:
    """Raises HeadLost when nothing has answered at the head's address for `patience()` seconds."""
    address: str = ray.get_runtime_context().gcs_address
    host, _, port = address.rpartition(":")
    await watch_address(host.strip("[]"), int(port), patience())


async def watch_address(host: str, port: int, seconds: float) -> NoReturn:
    """Raises HeadLost when attempts to connect have failed for `seconds`.

    They count from the first that failed, and a few must have: a process that was itself stopped for a while asks
    again, and so does one whose long attempt would miss a cable that was put back (TCP asks ever more seldom).
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
