"""Processes that inherited a mark in their environment: whatever a test has started, and what that started in turn."""

import time
from collections.abc import Callable

import psutil

from separation.processes import alive


def marked_processes(mark: str) -> list[str]:
    """Command lines of the processes whose environment has the mark as a value."""
    processes = psutil.process_iter(["environ", "cmdline"])
    marked = [process for process in processes if mark in (process.info["environ"] or {}).values() and alive(process)]
    return [" ".join(process.info["cmdline"] or ()) for process in marked]


def left_after(seconds: float, find: Callable[[], list[str]]) -> list[str]:
    """What is found still when so much time has passed; nothing as soon as nothing is found."""
    end = time.monotonic() + seconds
    while (found := find()) and time.monotonic() < end:
        time.sleep(0.2)
    return found
