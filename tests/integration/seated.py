"""Rewards for tests that report the devices, and torch's threads, that their worker may use."""

import os
from typing import Any

JUDGE, LATER = "reward/judge", "held_out/later"
"""Names of two pools, and of the custom resources that stand for their devices."""


def devices(images: Any, prompt: Any) -> list[float]:
    """How many GPUs this process is shown; -1 where nothing is said, and it would see all of them."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = -1 if shown is None else len([device for device in shown.split(",") if device])
    return [float(count)] * len(images)


def threads(images: Any, prompt: Any) -> list[float]:
    """Only this one, and its worker, needs torch."""
    import torch

    return [float(torch.get_num_threads())] * len(images)
