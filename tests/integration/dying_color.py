"""The color reward behind a server that dies or hangs at its first calls; a file has their number, which falls to 0."""

import os
import signal
from pathlib import Path

from async_flowrl.rewards.image_statistics import Color
from async_flowrl.types import ByteArray, Prompt

COUNT_FILE = "TEST_SERVER_DEATHS"
"""Environment variable with the file's path."""


def dying_color(images: ByteArray, prompt: Prompt) -> list[float]:
    """The color reward's scores, unless it is the process's turn to die."""
    return _scored(images, prompt, signal.SIGKILL)


def stopped_color(images: ByteArray, prompt: Prompt) -> list[float]:
    """The whole process stands still, as one whose driver hangs: connections are accepted, nothing is answered."""
    return _scored(images, prompt, signal.SIGSTOP)


def _scored(images: ByteArray, prompt: Prompt, turn: signal.Signals) -> list[float]:
    file = Path(os.environ[COUNT_FILE])
    if left := int(file.read_text()):
        file.write_text(str(left - 1))
        os.kill(os.getpid(), turn)
    return list(Color()(images, prompt))
