"""SeparatePools: deadlines and deliveries of trainer ranks and rollout workers that share no process.

shared/controller.py has those of processes that sample and train.
"""

from collections.abc import Iterable

from async_flowrl.config.schema import Config
from async_flowrl.controller.deadlines import Deadlines
from async_flowrl.controller.endpoints import RolloutEndpoint
from checkpoint_engine import DeliveryOptions


class SeparatePools:
    """The controller's view of trainer ranks and rollout workers that share no process."""

    endpoint: type[RolloutEndpoint] = RolloutEndpoint  # Receiving end of a rollout worker.

    def __init__(self, config: Config, transport: str, deadlines: Deadlines) -> None:
        self.config, self.transport, self.deadlines = config, transport, deadlines

    def delivery_options(self, stream: str) -> DeliveryOptions:
        """Returns the options with which the versions of `stream` are delivered to the rollout workers."""
        config = self.config
        return DeliveryOptions(
            retries=config.checkpoint_engine.retries, deadline=config.deadlines.publish, retain=config.live_versions
        )

    def begin_training(self, ranks: Iterable[int]) -> None:
        """Called when these trainer ranks get work."""

    def end_training(self, ranks: Iterable[int]) -> set[int]:
        """Called when these trainer ranks have no work left; returns the rollout workers that may now get tickets."""
        return set()

    def trains(self, index: int) -> bool:
        """Returns True if the process of the rollout worker of this index trains now."""
        return False
