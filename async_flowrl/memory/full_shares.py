"""Memory of a trainer rank that has a share of the trained weights (tune=full with trainer.shard=full)."""

import math
from collections.abc import Mapping

from async_flowrl.memory.host_memory import FLOAT32_BYTES
from async_flowrl.memory.sizes import Sizes

GATHERED_BLOCKS = 3
"""Blocks that FSDP2 holds whole at once: the one that computes, the next one, and the buffer it is gathered in."""
REDUCED_BLOCKS = 2
"""Blocks whose gradient is whole at once, in the dtype that is computed in and as the input of a reduce-scatter."""


def of_one_rank(parts: Mapping[str, int], model: Sizes, ranks: int) -> dict[str, int]:
    """Returns the parts of the footprint of one of `ranks` ranks, name → bytes.

    `parts` are those of a rank that has all of the weights. FSDP2 keeps the trained weights in float32 beside the
    masters, and frozen weights in their own dtype. There is a single buffer for the sum of the gradients: after the
    death of a rank the step starts from a checkpoint, so no earlier sum has to be kept.
    """
    trained, frozen = model.adapter_parameters, model.base_bytes - model.version_bytes
    counted = {"base weights", "activations", "sum of the gradients"}
    shares = {name: math.ceil(size / ranks) for name, size in parts.items() if name not in counted}
    blocks = GATHERED_BLOCKS + REDUCED_BLOCKS * (1 + FLOAT32_BYTES / model.itemsize)
    return {
        "base weights": model.buffer_bytes + math.ceil((frozen + FLOAT32_BYTES * trained) / ranks),
        **shares,
        "sum of the gradients": math.ceil(2 * FLOAT32_BYTES * trained / ranks),
        "activations": parts["activations"],
        "gathered blocks": model.root_bytes + math.ceil(blocks * max(model.block_bytes)),
    }
