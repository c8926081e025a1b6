"""The worker classes of a run, late or sending wrong bytes as a Disturbance says (disturbed.py)."""

from typing import Any

from async_flowrl.rewards.reward_worker import RewardWorker
from async_flowrl.rollout.rollout_worker import RolloutWorker
from async_flowrl.shared.shared_worker import SharedRollout, SharedTrainer, SharedWorker
from async_flowrl.training.trainer_worker import TrainerWorker
from async_flowrl.training.versions import PublishedStreams
from async_flowrl.types import POLICY, ByteArray
from benchmarks.disturbed import Disturbance
from checkpoint_engine import Header, Publisher
from checkpoint_engine.gather import GatheredVersions, Share


class LatePublisher(Publisher):
    """Seals late, and can send the bytes of version 0 for those of every newer one."""

    disturbance: Disturbance
    frozen = False

    def seal(self, version: int) -> Header:
        self.disturbance.wait("publish", "publish", version)
        header = super().seal(version)
        if self.frozen and version == 0:
            self.hold(0)
        return header

    def payload(self, version: int) -> tuple[Header, ByteArray]:
        header, data = super().payload(version)
        return header, super().payload(0)[1] if self.frozen and version > 0 else data


class LateVersions(GatheredVersions):
    """Gathers late."""

    disturbance: Disturbance

    def gather(self, version: int, share: Share) -> Header | None:
        self.disturbance.wait("publish", "publish", version)
        return super().gather(version, share)


LATE = {Publisher: LatePublisher, GatheredVersions: LateVersions}


def late(sender: PublishedStreams, disturbance: Disturbance) -> PublishedStreams:
    """Makes the publishers of a sender late ones; returns the sender."""
    for publisher in filter(None, (sender.policy, sender.ema)):
        if type(publisher) in LATE:
            made: Any = publisher
            made.disturbance = disturbance
            made.frozen = disturbance.freeze_publish and publisher.stream == POLICY
            made.__class__ = LATE[type(publisher)]
    return sender


class _Late:
    """What disturbs a worker."""

    def __init__(self, *given: Any, disturbance: Disturbance, **options: Any) -> None:
        super().__init__(*given, **options)
        self.disturbance = disturbance


class LateTrainer(_Late, TrainerWorker):
    """A trainer rank whose steps and publishers are late."""

    def take_step(self) -> Any:
        stats = super().take_step()
        self.disturbance.wait("update", "update", stats.step, stats.update)
        return stats

    def _new_sender(self) -> PublishedStreams:
        return late(super()._new_sender(), self.disturbance)


class LateRollout(_Late, RolloutWorker):
    def generate(self, requests: Any) -> Any:
        made = super().generate(requests)
        self.disturbance.wait("generate", self.name, requests[0].ordinal)
        return made


class _LateSharedTrainer(LateTrainer, SharedTrainer):
    pass


class _LateSharedRollout(LateRollout, SharedRollout):
    pass


class LateShared(SharedWorker):
    """Rank and rollout worker in one process, both late."""

    def __init__(self, *given: Any, disturbance: Disturbance, **options: Any) -> None:
        super().__init__(*given, **options)
        self.trainer.disturbance = self.rollout.disturbance = disturbance
        self.trainer.__class__, self.rollout.__class__ = _LateSharedTrainer, _LateSharedRollout


class LateReward(_Late, RewardWorker):
    calls = 0

    def score(self, *given: Any) -> Any:
        scores = super().score(*given)
        self.disturbance.wait("score", self.name, self.calls)
        self.calls += 1
        return scores
