"""Memory of a worker's GPU; the controller asks each worker for it before models are loaded."""

import torch


def total_memory() -> int | None:
    """Total memory in bytes of the first GPU that is visible to this process; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)
