"""Starting a local Ray head node without its autoscaler, log monitor and dashboard processes."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import ray

from separation.ray_agents import quick_agents

log = logging.getLogger(__name__)

UNUSED = ("start_monitor", "start_log_monitor", "start_api_server")
"""Methods of Ray's `Node` that start the autoscaler, the log monitor and the dashboard's server.

No option of `ray.init` and no environment variable prevents them: `include_dashboard=False` removes only the web pages.
"""
LAST = "start_raylet"
"""Method that starts the last process of a head node."""
DIFFERENT = (AttributeError, TypeError, KeyError, AssertionError)
"""Errors to expect from a version of Ray that calls these methods, or uses the attributes they set, in another way."""


def start_with_what_runs(start: Callable[[], object], meanwhile: Thread | None = None) -> None:
    """Calls `start`, which must start a Ray head node, while the three processes above are switched off.

    `meanwhile` is a thread that is started when the GCS server and the raylet have been launched and get ready, and not
    before, because a process should not fork beside its threads.

    This project uses none of them; each takes half a second of CPU at the start and 80 to 100 MB. What remains is the
    GCS server, the raylet, and the raylet's agents (ray_agents.py). If `start` raises an error listed in
    `DIFFERENT`, a warning is logged, Ray is shut down, the end of `meanwhile` is waited for, and `start` is called
    again with all processes. Other errors of `start` are raised as they are.
    """
    try:
        with _without_unused(meanwhile):
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
        if meanwhile is not None and meanwhile.ident is not None:
            meanwhile.join()
        start()


@contextmanager
def _without_unused(meanwhile: Thread | None) -> Iterator[None]:
    """Replaces the methods named in `UNUSED` inside the block and restores them afterwards.

    `meanwhile` is started after the raylet's launch, which is the last. Raises AttributeError if this version of Ray
    has no such class or methods.
    """
    try:
        from ray._private.node import Node
    except ImportError as error:
        raise AttributeError(str(error)) from error
    originals = {name: getattr(Node, name) for name in (*UNUSED, LAST)}
    for name in UNUSED:
        setattr(Node, name, _not_started)

    def start_last(node: Any, *arguments: Any, **options: Any) -> None:
        with quick_agents(node):
            originals[LAST](node, *arguments, **options)
        if meanwhile is not None and meanwhile.ident is None:
            meanwhile.start()

    setattr(Node, LAST, start_last)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Node, name, original)


def _not_started(node: Any, *_: Any, **__: Any) -> None:
    """Replaces a method that starts a process; sets the empty dashboard address that Ray reads later."""
    node._webui_url = ""
