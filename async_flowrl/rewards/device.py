"""The device of a reward with a model, and the checks of options that such rewards share."""

import math
import re
from typing import TYPE_CHECKING

from async_flowrl.config.messages import unknown_name

if TYPE_CHECKING:
    import torch

DEVICES = ("auto", "cpu", "cuda")


def check_model_options(reward: str, *, device: str, batch_size: int, scale: float = 1.0) -> None:
    """Raises ValueError for an unknown `device`, a `batch_size` below 1, or a `scale` not finite and above 0."""
    if device not in DEVICES and not re.fullmatch(r"cuda:\d+", device):
        raise ValueError(unknown_name(f"the {reward} reward's device", device, DEVICES))
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"the {reward} reward's batch_size must be an integer of at least 1, got {batch_size!r}")
    if not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise ValueError(f"the {reward} reward's scale must be a finite number above 0, got {scale!r}")


def choose_device(reward: str, wanted: str) -> "torch.device":
    """Returns the device; "auto" is a GPU if this process sees one, else the CPU.

    Raises ValueError if a GPU is asked for and this process sees none.
    """
    import torch

    seen = torch.cuda.is_available()
    device = torch.device("cuda" if seen else "cpu") if wanted == "auto" else torch.device(wanted)
    if device.type == "cuda" and not seen:
        raise ValueError(
            f"the {reward} reward's device is {wanted}, and this process sees no GPU: give its workers one "
            f"(gpus_per_worker of the reward or of its term), or use auto or cpu"
        )
    return device
