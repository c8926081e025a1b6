"""Worker of `placement=shared`: a rollout worker and a trainer rank in one process.

They share only the frozen base weights and the device, on which they take turns (turns.py), so the same calls give the
same bits as in two processes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import torch

from async_flowrl.config.resolution import Resolution
from async_flowrl.config.schema import Config
from async_flowrl.policies.one_base import OneBase
from async_flowrl.policies.pipeline import PipelinePolicy
from async_flowrl.policies.registry import ResolvedModel
from async_flowrl.rollout.registry import PARTS
from async_flowrl.rollout.rollout_worker import RolloutWorker, device
from async_flowrl.rollout.text_encoder import StoredEmbeddings
from async_flowrl.shared.turns import Turns
from async_flowrl.training.flat import FlatParameters
from async_flowrl.training.messages import Manifest, TrainRequest, UpdateStats
from async_flowrl.training.trainer_worker import TrainerWorker
from async_flowrl.training.versions import PublishedStreams, Versions
from async_flowrl.types import EmbeddingKey, RolloutRequest, Trajectory
from checkpoint_engine import RING, Ack, Header
from checkpoint_engine.errors import TransferCorrupted, WeightsMismatch
from checkpoint_engine.side_stream import SideStream, on, recorded

cuda: Any = torch.cuda  # torch.cuda as Any, because its stream classes have no types.


class TrainingLane:
    """Streams of the training thread, for that thread alone; its work runs in order, also across the two streams."""

    def __init__(self, turns: Turns, device: torch.device) -> None:
        self.turns, self._device = turns, device
        self._side = SideStream.of(device)
        self._depth = 0  # Number of turns that were entered and not left, each inside the one before.

    @contextmanager
    def turn(self, *, more: bool = False) -> Iterator[None]:
        """Context of a unit of training, which begins after the ticket under way; as `Turns.training`."""
        with self.turns.training(more=more):
            if self._side is None:
                yield
                return
            default = cuda.default_stream(self._device)
            default.wait_event(self._side.record())
            self._depth += 1
            try:
                with cuda.stream(default):
                    yield
            finally:
                self._depth -= 1
                with cuda.stream(default):
                    self._side.wait(recorded(self._device))

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Context of work that takes no turn and runs beside a ticket; at its end the device has finished the work."""
        if self._side is None or self._depth:
            yield
            return
        with self._side.current():
            yield
        self._side.synchronize()


class SharedWorker:
    """Rollout worker `index` and trainer rank `index` in one process."""

    def __init__(
        self,
        config: Config,
        model: ResolvedModel,
        index: int,
        name: str,
        sizes: Sequence[Resolution] = (),
        upcoming: Sequence[EmbeddingKey] = (),
    ) -> None:
        """`name` is that of the process in its pool; both workers get the number at its end."""
        turns, number = Turns(), name.rpartition("-")[2]
        lane = TrainingLane(turns, torch.device(device()))
        base = OneBase(model, parts=PARTS[config.rollout.text_encoder], device=device())
        self.trainer = SharedTrainer(config, model, index, f"trainer-{number}", sizes, base=base, turn=lane.turn)
        self.trainer.lane = lane
        self.rollout = SharedRollout(config, model, index, f"rollout-{number}", upcoming, base=base)
        self.rollout.turns, self.rollout.trainer = turns, self.trainer


def beside(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `method`, of an object with a `lane`, as one that takes no turn and runs beside the ticket under way."""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.lane.beside():
            return method(self, *args, **kwargs)

    return run


class SharedTrainer(TrainerWorker):
    """Trainer rank of a shared process.

    `train` takes a turn. `add_up`, `take_step` and what is wrapped in `beside` run while a ticket is generated; only to
    measure a KL they take turns, and `UpdateStats.waited` says how long they waited.
    """

    lane: TrainingLane
    waited = 0.0  # Seconds for which the end of the present optimizer step has waited for tickets: to measure its KL.

    def train(self, request: TrainRequest, *trajectories: Trajectory) -> Manifest:
        with self.lane.turn(more=request.more):
            return super().train(request, *trajectories)

    def _new_sender(self) -> PublishedStreams:
        return SharedStreams(self.config, self.policy, self.parameters, self.versions, self.lane)

    def add_up(self, request: TrainRequest, *trajectories: Trajectory) -> int | None:
        self.waited = 0.0  # The step before may have been given up after it had waited.
        with self._counted(), self.lane.beside():
            return super().add_up(request, *trajectories)

    def take_step(self) -> UpdateStats:
        with self._counted(), self.lane.beside():
            stats = super().take_step()
        return replace(stats, waited=self.waited)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        before = self.lane.turns.waited
        try:
            yield
        finally:
            self.waited += self.lane.turns.waited - before

    load = beside(TrainerWorker.load)
    snapshot = beside(TrainerWorker.snapshot)
    take_over = beside(TrainerWorker.take_over)
    restore = beside(TrainerWorker.restore)


class SharedStreams(PublishedStreams):
    """Sending end of a shared process; it stages versions beside the ticket under way."""

    def __init__(
        self, config: Config, policy: PipelinePolicy, parameters: FlatParameters, versions: Versions, lane: TrainingLane
    ) -> None:
        super().__init__(config, policy, parameters, versions)
        self.lane = lane

    stage = beside(PublishedStreams.stage)
    proof = beside(PublishedStreams.proof)


class SharedRollout(RolloutWorker):
    """Rollout worker of a shared process; takes the versions that the trainer rank of its process has made."""

    turns: Turns
    trainer: TrainerWorker

    def load(self) -> dict[str, str]:
        """Builds the model, or forgets all versions if the model was built before; returns as RolloutWorker.load."""
        if not hasattr(self, "receiver"):
            return super().load()
        self.receiver.clear()
        return {"base_digest": self.base_digest}

    def _encode_ahead(self, embeddings: StoredEmbeddings) -> None:
        # The trainer rank of a newcomer may be there first, and must not train while the base is aside.
        with self.turns.sampling():
            super()._encode_ahead(embeddings)

    def generate(self, requests: Sequence[RolloutRequest]) -> tuple[Any, ...]:
        with self.turns.sampling():
            return super().generate(requests)

    def seconds_at_work(self) -> float:
        """Returns the seconds for which the present ticket has computed, without waits; from any lane."""
        return self.turns.sampled_for()

    def keep_local(self, header: Header, slot: str = RING) -> Ack | None:
        """Puts the process's own version into `slot` and returns the acknowledgement; None if it has not made it.

        Raises WeightsMismatch if its digest differs from the one in `header`, which is that of the first rank's
        version.
        """
        versions: Versions | None = getattr(self.trainer, "versions", None)
        flat = None if versions is None else versions.retained.get(header.version)
        if flat is None:
            return None
        with on(self.receiver.side):  # Copies on the stream of the tickets would wait for the one under way.
            packed = header.layout.packed(self.trainer.parameters.named(flat))
        try:
            return self.receiver.receive(header, packed, slot)
        except TransferCorrupted as error:
            raise WeightsMismatch(
                f"{self.trainer.name} made other weights of version {header.version} than the first rank: {error}"
            ) from error
