"""Memory of a worker's device, asked for before anything is loaded."""

import torch


def total_memory() -> int | None:
    """Bytes of the first GPU that this process sees; None where it sees none."""
    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)
