"""FloatSum, in place of the trainer's exact sum of gradients, for tests that must notice the difference."""

import torch

from async_flowrl.training.exact import Account, ExactSum
from async_flowrl.training.parts import World as TrainerWorld


class FloatSum(ExactSum):
    """A mutant (a deliberately wrong variant) of ExactSum: it adds gradients as floats, so the order changes bits."""

    def __init__(self, numel: int, device: torch.device) -> None:
        super().__init__(numel, device)
        self.floats = torch.zeros(numel, device=device)

    def begin(self) -> None:
        super().begin()
        self.floats.zero_()

    def add(self, gradient: torch.Tensor) -> torch.Tensor:
        self.floats.add_(gradient)
        return super().add(gradient)

    def reduce(self, world: TrainerWorld) -> Account:
        world.sum(self.floats)
        return super().reduce(world)

    def mean(self, out: torch.Tensor, rows: int) -> None:
        torch.div(self.floats, rows, out=out)
