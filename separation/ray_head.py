"""A Ray cluster of our own, started with only what a run needs of it."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

log = logging.getLogger(__name__)

UNUSED = ("start_monitor", "start_log_monitor", "start_api_server")
"""What starts Ray's autoscaler, the reader of the workers' logs, and the dashboard, of which `include_dashboard=False`
leaves out the pages alone. `ray.init` has no option and Ray no environment variable for any of them."""
DIFFERENT = (AttributeError, TypeError, KeyError, AssertionError)
"""What is raised where another version of Ray uses these methods, or what they leave behind, in another way."""


def start_with_what_runs(start: Callable[[], object]) -> None:
    """Calls `start`, which starts a head node, so that the node is a GCS server and a raylet with its two agents.

    The three processes left out read what nobody here writes or asks for: half a second of CPU and 80 to 100 MB each.
    Where this version of Ray cannot be started without them, it is started with them, and the log says so.
    """
    try:
        with _without_unused():
            start()
    except DIFFERENT as error:
        log.warning(
            "Ray %s cannot be started without its autoscaler, log monitor and dashboard (%s: %s): they are started, "
            "too, which changes nothing but half a second and some memory",
            ray.__version__,
            type(error).__name__,
            error,
        )
        ray.shutdown()
        start()


@contextmanager
def _without_unused() -> Iterator[None]:
    """Raises AttributeError or ImportError as AttributeError where Ray has no such methods."""
    try:
        from ray._private.node import Node
    except ImportError as error:
        raise AttributeError(str(error)) from error
    originals = {name: getattr(Node, name) for name in UNUSED}
    for name in UNUSED:
        setattr(Node, name, _not_started)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Node, name, original)


def _not_started(node: Any, *_: Any, **__: Any) -> None:
    """In place of a method that would start a process."""
    node._webui_url = ""
