"""A process that samples and trains: a rollout worker and a trainer rank on one copy of the base.

The two are the classes of the separate pools, on threads of their own. They share the frozen base and the device,
which they use in turns; nothing else, so that the same calls give the same bits as in two processes.
"""

from collections.abc import Sequence
from typing import Any

from async_flowrl.config.schema import Config
from async_flowrl.policies.one_base import OneBase
from async_flowrl.policies.registry import ResolvedModel
from async_flowrl.rollout.registry import PARTS
from async_flowrl.rollout.worker import RolloutWorker, device
from async_flowrl.shared.turns import Turns
from async_flowrl.training.messages import Manifest, Summed, TrainRequest, UpdateStats
from async_flowrl.training.versions import Versions
from async_flowrl.training.worker import TrainerWorker
from async_flowrl.types import Asked, ByteArray, Resolution, RolloutReport, RolloutRequest, Trajectory
from checkpoint_engine import RING, Ack, Header
from checkpoint_engine.errors import TransferCorrupted, WeightsMismatch


class SharedWorker:
    """Worker `index` of the rollout pool, and rank `index` of the trainer."""

    def __init__(
        self,
        config: Config,
        model: ResolvedModel,
        index: int,
        name: str,
        sizes: Sequence[Resolution] = (),
        upcoming: Sequence[Asked] = (),
    ) -> None:
        """`sizes` and `upcoming` as the two workers have them."""
        turns, place = Turns(), name.rpartition("-")[2]
        base = OneBase(model, parts=PARTS[config.rollout.text_encoder], device=device())
        self.trainer = SharedTrainer(config, model, index, f"trainer-{place}", sizes, base=base, turn=turns.training)
        self.trainer.turns = turns
        self.rollout = SharedRollout(config, model, index, f"rollout-{place}", upcoming, base=base)
        self.rollout.turns, self.rollout.trainer = turns, self.trainer


class SharedTrainer(TrainerWorker):
    """Computes before any further ticket is made."""

    turns: Turns

    def train(self, request: TrainRequest, *trajectories: Trajectory) -> UpdateStats | Summed | Manifest:
        with self.turns.training(more=request.more):
            return super().train(request, *trajectories)


class SharedRollout(RolloutWorker):
    """Makes tickets when its trainer rank has nothing to compute, and keeps the versions that this rank makes."""

    turns: Turns
    trainer: TrainerWorker

    def load(self) -> dict[str, str]:
        """Builds the model, or, where it was built before, forgets all versions."""
        if not hasattr(self, "receiver"):
            return super().load()
        self.receiver.clear()
        return {"base_digest": self.base_digest}

    def generate(self, request: RolloutRequest) -> tuple[RolloutReport, ByteArray, Trajectory | None]:
        with self.turns.sampling():
            return super().generate(request)

    def generate_together(self, requests: Sequence[RolloutRequest]) -> tuple[Any, ...]:
        with self.turns.sampling():
            return super().generate_together(requests)

    def seconds_at_work(self) -> float:
        """How long the ticket under way has computed by now, without its wait for training; any lane may ask."""
        return self.turns.sampled_for()

    def keep_own(self, header: Header, slot: str = RING) -> Ack | None:
        """Retains a version as this process's trainer rank has made it; None where it has not, or not any more.

        Raises WeightsMismatch where that is not what the first rank has made.
        """
        versions: Versions | None = getattr(self.trainer, "versions", None)
        flat = None if versions is None else versions.retained.get(header.version)
        if flat is None:
            return None
        own = header.layout.packed(self.trainer.parameters.named(flat))
        try:
            return self.receiver.receive(header, own, slot)
        except TransferCorrupted as error:
            raise WeightsMismatch(
                f"{self.trainer.name} made other weights of version {header.version} than the first rank: {error}"
            ) from error
