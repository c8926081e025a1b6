"""Seconds that calls of workers may take, from the section `deadlines` of the configuration."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from async_flowrl.config.schema import Config
from separation.group import Worker
from separation.supervise import deadline

# Tickets a worker may have: the one it makes, and the next, so that it need not wait for an answer and a call.
TICKETS_PER_WORKER = 2


class Deadlines:
    """Deadlines of processes that either sample or train (shared/controller.py has those of processes that do both)."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def generate(self, tickets: int) -> float:
        """Returns the seconds that a rollout worker may take for so many tickets."""
        return self.config.deadlines.generate * tickets

    def update(self, calls: int) -> float:
        """Returns the seconds that a trainer rank may take for so many calls; a call trains a group or ends a step."""
        return self.config.deadlines.update * calls

    @asynccontextmanager
    async def of_tickets(self, worker: Worker, tickets: int, what: str) -> AsyncIterator[None]:
        """Raises DeadlineExceeded, naming `what`, if the body waits too long for so many `tickets` of the worker."""
        async with deadline(self.generate(tickets), what):
            yield
