"""The color reward behind a server that dies at a call if the number in a file is above 0, and lowers it by 1."""

import os
import signal
from pathlib import Path

from async_flowrl.rewards.image_statistics import Color
from async_flowrl.types import ByteArray, Prompt

COUNT_FILE = "TEST_SERVER_DEATHS"
"""Environment variable with the file's path."""


def dying_color(images: ByteArray, prompt: Prompt) -> list[float]:
    """The color reward's scores, unless it is the process's turn to die."""
    file = Path(os.environ[COUNT_FILE])
    if left := int(file.read_text()):
        file.write_text(str(left - 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return list(Color()(images, prompt))
