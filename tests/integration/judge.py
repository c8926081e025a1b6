"""A reward for tests that fails for the prompts that a file lists, one word per line."""

import os
from pathlib import Path

from async_flowrl.types import ByteArray, Prompt
from tests.integration.brightness import brightness

DOWN_FILE = "TEST_JUDGE_DOWN"
"""Environment variable with the file's path."""


def judge(images: ByteArray, prompt: Prompt) -> list[float]:
    """Brightness; raises ConnectionError for a prompt that contains a word of the file."""
    if any(word in prompt.text for word in Path(os.environ[DOWN_FILE]).read_text().split()):
        raise ConnectionError("the judge is down")
    return brightness(images, prompt)
