"""DyingTrainer is a trainer rank that kills itself (SIGKILL) at a given place of a step."""

import time
from typing import Any

from torch import Tensor

from async_flowrl.training.fsdp import World
from async_flowrl.training.messages import Layout, Summed, TrainRequest, UpdateStats
from async_flowrl.training.update import Update
from async_flowrl.training.worker import TrainerWorker
from tests.support.process_pool import die

OTHERS_FIRST = 0.5
"""Seconds that a rank waits before it dies in the all-reduce, so that the other ranks have reached it."""
OTHERS_LATER = 1.5
"""Seconds that the other ranks wait before they step, if one rank dies right after its step."""


class DyingTrainer(TrainerWorker):
    """A trainer rank; `deaths` is worker name → (step, place). A rank that is not in it lives.

    The places are `micro-batch` (at its second micro-batch), `manifest` (before it reports its sum), `all-reduce`
    (before the sum over ranks), and `stepped` (after the optimizer step).
    """

    def __init__(self, deaths: dict[str, tuple[int, str]], **arguments: Any) -> None:
        super().__init__(**arguments)
        self.when, self.where = deaths.get(self.name, (-1, ""))
        self.late = {step for step, place in deaths.values() if place == "stepped"}

    def load(self, layout: Layout | None = None) -> dict[str, Any]:
        info = super().load(layout)
        computed, add, left = Update._computed, World.sum, [2]

        def computing(gradients: Update, *args: Any, **kwargs: Any) -> Any:
            if self._now("micro-batch"):
                left[0] -= 1
                if left[0] == 0:
                    die()
            return computed(gradients, *args, **kwargs)

        def adding(world: World, values: Tensor) -> None:
            if self._now("all-reduce"):
                time.sleep(OTHERS_FIRST)
                die()
            add(world, values)

        Update._computed, World.sum = computing, adding  # type: ignore[method-assign]
        return info

    def add_up(self, request: TrainRequest, *trajectories: Any) -> Summed:
        if self._now("manifest"):
            die()
        return super().add_up(request, *trajectories)

    def take_step(self) -> UpdateStats:
        step, dies = self.update.under_way, self._now("stepped")
        if step in self.late and not dies:
            time.sleep(OTHERS_LATER)
        stats = super().take_step()
        if dies:
            die()
        return stats

    def _now(self, where: str) -> bool:
        return self.where == where and self.update.under_way == self.when
