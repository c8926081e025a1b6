"""A Ray cluster of our own, started with only what a run needs of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ray._private.node import Node

UNUSED = ("start_monitor", "start_log_monitor", "start_api_server")
"""What starts Ray's autoscaler, the reader of the workers' logs, and the dashboard, of which `include_dashboard=False`
leaves out the pages alone. Ray has no option for it."""


@contextmanager
def only_what_runs() -> Iterator[None]:
    """A head node that is started inside is a GCS server and a raylet with its two agents.

    The three processes left out read what nobody here writes or asks for: half a second of CPU and 80 to 100 MB each.
    """
    originals = {name: getattr(Node, name) for name in UNUSED}
    for name in UNUSED:
        setattr(Node, name, _not_started)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Node, name, original)


def _not_started(node: Any, **_: Any) -> None:
    """In place of a method that would start a process."""
    node._webui_url = ""
