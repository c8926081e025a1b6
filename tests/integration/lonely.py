"""FlowGRPO that fails on the second trainer rank alone, between two collectives of the step."""

from typing import Any

import torch.distributed as dist

from async_flowrl.algorithms.flow_grpo import FlowGRPO

MESSAGE = "this rank fails alone"


class LonelyFlowGRPO(FlowGRPO):
    """The other rank has gathered its blocks for the backward pass by then, and waits for this one in the next one."""

    def loss(self, *arguments: Any, **options: Any) -> Any:
        if dist.is_initialized() and dist.get_rank() == 1:
            raise ArithmeticError(MESSAGE)
        return super().loss(*arguments, **options)
