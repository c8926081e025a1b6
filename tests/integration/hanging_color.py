"""The color reward behind a server that hangs at a call if the number in a file is above 0, and lowers it by 1."""

import os
import signal
from pathlib import Path

from async_flowrl.rewards.image_statistics import Color
from async_flowrl.types import ByteArray, Prompt
from tests.integration.dying_color import COUNT_FILE


def _turn() -> bool:
    file = Path(os.environ[COUNT_FILE])
    left = int(file.read_text())
    file.write_text(str(max(0, left - 1)))
    return left > 0


def stopped_color(images: ByteArray, prompt: Prompt) -> list[float]:
    """The whole process stands still, as one whose driver hangs: connections are accepted, nothing is answered."""
    if _turn():
        os.kill(os.getpid(), signal.SIGSTOP)
    return list(Color()(images, prompt))
