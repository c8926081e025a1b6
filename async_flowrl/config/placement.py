"""Facts that follow from the setting `placement`, for plans, summaries and reports.

The controller's part of it is `controller/deadlines.py`.
"""

from typing import NamedTuple

from async_flowrl.config.schema import SHARED, Config
from async_flowrl.config.scoring_pools import ROLLOUT, TRAINER


class Placement(NamedTuple):
    together: bool  # Whether a process samples and trains, in turns.
    pools: tuple[str, ...]  # Names of the pools whose processes hold the model.
    note: str = ""  # Addition to a list of the pools.

    def step_seconds(self, generation: float, update: float) -> float:
        return generation + update if self.together else max(generation, update)

    def devices(self, trainers: int, rollouts: int) -> int:
        return trainers if self.together else trainers + rollouts


SEPARATE_POOLS = Placement(together=False, pools=(TRAINER, ROLLOUT))
ONE_POOL = Placement(together=True, pools=(SHARED,), note="; each of shared samples and trains")


def placement_of(config: Config) -> Placement:
    return recorded_placement(config.placement)


def recorded_placement(value: object) -> Placement:
    """Returns what follows from the `placement` of a run's records, which may lack it."""
    return ONE_POOL if value == SHARED else SEPARATE_POOLS
