"""Deadlines of calls to trainer ranks and rollout workers, and what else depends on whether they share processes.

shared/controller.py has those of processes that sample and train.
"""

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager

from async_flowrl.config.schema import Config
from async_flowrl.controller.endpoints import RolloutEndpoint
from checkpoint_engine import DeliveryOptions
from separation.group import Worker
from separation.supervise import deadline

# Tickets a worker may have: the one it makes, and the next, so that it need not wait for an answer and a call.
TICKETS_PER_WORKER = 2


class SeparatePools:
    """The controller's view of trainer ranks and rollout workers that share no process."""

    endpoint: type[RolloutEndpoint] = RolloutEndpoint  # Receiving end of a rollout worker.

    def __init__(self, config: Config) -> None:
        self.config = config

    def generate_seconds(self, tickets: int) -> float:
        """Returns the seconds that a rollout worker may take for so many tickets."""
        return self.config.deadlines.generate * tickets

    def update_seconds(self, calls: int) -> float:
        """Returns the seconds that a trainer rank may take for so many calls; a call trains a group or ends a step."""
        return self.config.deadlines.update * calls

    def time_for_tickets(self, worker: Worker, tickets: int, what: str) -> AbstractAsyncContextManager[None]:
        """Raises DeadlineExceeded, naming `what`, if the body waits too long for so many `tickets` of the worker."""
        return deadline(self.generate_seconds(tickets), what)

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
        return False
