"""Stages that tests start in place of those of the first hour."""

import os
import signal
import subprocess
import sys
import time

from benchmarks.gpu_first_hour.task import Task


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's error, without importing torch."""


def sound(task: Task) -> None:
    task.say("speed", seconds=1.5)
    task.say("bits", ok=True)


def wrong(task: Task) -> None:
    task.say("one digest", ok=False)


def hangs(task: Task) -> None:
    """Says something, starts a process in a session of its own, and waits for ever."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    task.say("before", child=child.pid)
    time.sleep(600)


def out_of_memory(task: Task) -> None:
    raise MemoryError


def device_out_of_memory(task: Task) -> None:
    raise OutOfMemoryError("CUDA out of memory")


def killed(task: Task) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def silent(task: Task) -> None:
    pass


def meets(task: Task) -> None:
    """Is ok if the other stage of this name runs, too, within two minutes."""
    (task.work / f"met_{task.answer.stem}").touch()
    until = time.monotonic() + 120
    while len(list(task.work.glob("met_*"))) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    task.say("met", ok=len(list(task.work.glob("met_*"))) == 2)
