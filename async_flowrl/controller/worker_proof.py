"""The proof that weights reach the right modules of a rollout worker's network: a new worker gives it before it serves.

Delivered test weights (the canary, canary.py) must have the same effect in its network as in the trainer's.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from async_flowrl.config.schema import Config
from async_flowrl.controller.canary import Canary
from async_flowrl.controller.context import Attempt
from async_flowrl.controller.endpoints import RolloutEndpoint
from async_flowrl.controller.sender_errors import answers_of, sender_errors
from async_flowrl.controller.shard_endpoints import ShardedRolloutEndpoint, ShardedTrainerEndpoint
from async_flowrl.controller.share_payload import ShardedPayload
from async_flowrl.controller.trainer import TrainerGroup
from checkpoint_engine import CANARY_VERSION, check_binding
from checkpoint_engine.errors import Verdict, verdict
from separation.group import RefLost, Worker, WorkerDied
from separation.supervise import DeadlineExceeded, deadline

T = TypeVar("T")


@dataclass
class WorkerProof:
    """Sends the canary to new rollout workers and compares what they make of it; `begin` must be called first."""

    attempt: Attempt
    trainers: TrainerGroup
    transport: str
    canary: Canary = field(init=False)
    _taking: int = field(init=False, default=0)
    """Workers that take the canary now."""

    async def begin(self, sender: ShardedTrainerEndpoint | None = None) -> None:
        """Has the first trainer rank make the canary, or all ranks if they have shares, whose `sender` is then given.

        Raises SenderLost, SenderFailed or SenderLate.
        """
        if sender is not None:
            self.canary = Canary(*await sender.canary())
        else:
            self.canary = await self._by_first("sender.canary", Canary.of)

    async def of(self, worker: Worker) -> None:
        """Delivers the canary to the worker and compares the results of its network with the trainer's.

        Raises WeightsMismatch, which names the module that differs, WorkerDied or DeadlineExceeded of the worker, and
        SenderLost, SenderFailed or SenderLate of a trainer rank.
        """
        with self._taken():
            await self._deliver(worker)
        proof = await in_time(self.attempt.config, f"proof of {worker.name}", worker.call("prove", CANARY_VERSION))
        check_binding(self.canary.probe, proof, who=worker.name)

    async def _deliver(self, worker: Worker) -> None:
        config, sharded = self.attempt.config, self.trainers.sharded
        kind = ShardedRolloutEndpoint if sharded else RolloutEndpoint
        end, retries = kind(worker, self.attempt.observer, self.transport), config.checkpoint_engine.retries
        for attempt in range(retries + 1):
            try:
                received = end.receive(self.canary.header, self.canary.payload)
                # Without a deadline if ranks have shares, because each of their answers has its own.
                await (received if sharded else in_time(config, f"canary to {worker.name}", received))
                return
            except Exception as error:
                if verdict(error) is not Verdict.RESEND or isinstance(error, DeadlineExceeded):
                    raise
                if attempt == retries:
                    raise WorkerDied(worker.name, f"given up, the canary does not arrive: {error}") from error
                if isinstance(error, RefLost) and not sharded:  # Shares are held by their ranks.
                    self.canary = await self._by_first("sender.canary_again", self.canary.again)

    @contextmanager
    def _taken(self) -> Iterator[None]:
        """Context in which a worker takes the canary. After the last one, the controller keeps no bucket of its shares.

        A later worker has them fetched from the ranks again, so they need no room in the object store between.
        """
        self._taking += 1
        try:
            yield
        finally:
            self._taking -= 1
            if self._taking == 0 and isinstance(self.canary.payload, ShardedPayload):
                self.canary.payload.let_go()

    async def _by_first(self, method: str, make: Callable[[Worker], Awaitable[Canary]]) -> Canary:
        """Returns the canary that the first rank makes, within `deadlines.publish`.

        Raises SenderLost if the rank has died, SenderFailed if it raises an exception, and SenderLate, which says that
        it has not answered `method`.
        """
        rank = self.trainers.first
        with sender_errors():
            async with answers_of([rank.name], method, self.attempt.config.deadlines.publish):
                return await make(rank)


async def in_time(config: Config, what: str, call: Awaitable[T]) -> T:
    """Returns the call's result. Raises DeadlineExceeded, which names `what`, after `deadlines.publish`."""
    async with deadline(config.deadlines.publish, f"publish: {what}"):
        return await call
