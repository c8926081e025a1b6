"""A reward for tests that reports how many threads torch has in its worker."""

from typing import Any

import torch


def threads(images: Any, prompt: Any) -> list[float]:
    return [float(torch.get_num_threads())] * len(images)
