"""`left_behind` finds processes of a run that still live after its end: reward servers and their keepers."""

import os
import time
from pathlib import Path

import psutil

from tests.integration.runs import LIMIT


def running(folder: Path) -> list[psutil.Process]:
    """The processes that name the run's folder: servers and keepers have their token's file there."""
    others = [each for each in psutil.process_iter(["cmdline", "status"]) if each.pid != os.getpid()]
    alive = [each for each in others if each.info["status"] != psutil.STATUS_ZOMBIE]
    return [each for each in alive if str(folder) in " ".join(each.info["cmdline"] or [])]


def left_behind(folder: Path) -> list[str]:
    """Their command lines."""
    return [" ".join(each.info["cmdline"]) for each in running(folder)]


def wait_for_none(folder: Path) -> None:
    end = time.monotonic() + LIMIT
    while (left := left_behind(folder)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left
