"""Facts that follow from the setting `placement`, for plans, summaries and reports.

The controller's part of it is `controller/placement.py`.
"""

from async_flowrl.config.pools import ROLLOUT, TRAINER
from async_flowrl.config.schema import SHARED, Config


class Separate:
    """Trainer ranks and rollout workers are processes of their own and work at the same time."""

    together = False  # Whether a process samples and trains.
    pools: tuple[str, ...] = (TRAINER, ROLLOUT)  # Names of the pools whose processes hold the model.
    note = ""  # Addition to a list of the pools.

    def step_seconds(self, generation: float, update: float) -> float:
        """Returns the least seconds of a step of so many seconds of generation and of training."""
        return max(generation, update)

    def devices(self, trainers: int, rollouts: int) -> int:
        """Returns the number of devices of the trainer ranks and rollout workers."""
        return trainers + rollouts


class Shared(Separate):
    """Each process samples and trains, in turns."""

    together = True
    pools = (SHARED,)
    note = "; each of shared samples and trains"

    def step_seconds(self, generation: float, update: float) -> float:
        return generation + update

    def devices(self, trainers: int, rollouts: int) -> int:
        return trainers


# Value of `placement` → what follows; None for records of a run that lack it.
PLACEMENTS: dict[str | None, Separate] = {"separate": Separate(), SHARED: Shared(), None: Separate()}


def placement_of(config: Config) -> Separate:
    """Returns what follows from the configuration's `placement`."""
    return PLACEMENTS[config.placement]
