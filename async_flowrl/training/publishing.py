"""The sending end of the weights, on the trainer rank that sends them: versions of the policy and of its EMA."""

from typing import cast

import torch
from torch import Tensor

from async_flowrl.config.schema import Config
from async_flowrl.policies.base import Policy
from async_flowrl.policies.tuning import tuning_of
from async_flowrl.seeds import derive
from async_flowrl.training.flat import FlatParameters
from async_flowrl.training.versions import Versions
from async_flowrl.types import EMA, POLICY, ByteArray
from checkpoint_engine import CANARY_VERSION, Header, Publisher, canary_tensors
from checkpoint_engine.ends import SendingEnd
from checkpoint_engine.sealed import SealedVersions


class PublishedStreams:
    """The publishers of the policy and, with `trainer.ema_decay`, of its EMA.

    `stage` and `canary` run in the trainer's main thread. Calls to the publishers themselves run in another thread (the
    "publish" lane), at the same time as the next training step.
    """

    def __init__(self, config: Config, policy: Policy, parameters: FlatParameters, versions: Versions) -> None:
        self._config, self._policy, self._parameters, self._versions = config, policy, parameters, versions
        self._tuning = tuning_of(config)
        self.policy: SealedVersions = self._new_publisher(POLICY)
        self.ema: SealedVersions | None = None if versions.ema is None else self._new_publisher(EMA)
        self.collective = SendingEnd(self.policy, self._sent_from)

    @property
    def _sent_from(self) -> torch.device:
        return self._parameters.values.device

    def _new_publisher(self, stream: str) -> SealedVersions:
        return Publisher(
            self._parameters.named(self._parameters.values.data),
            stream,
            dtypes=self._versions.dtypes,
            alpha=self._tuning.alpha,
            rank=self._tuning.rank,
            retain=self._config.live_versions,
        )

    def stage(self, version: int, stream: str = POLICY) -> None:
        """Copies a version for its delivery; the trainer waits only for this copy.

        Raises ValueError for an unknown stream and for a version that is neither among the last ones nor held for an
        evaluation.
        """
        self._publisher(stream)
        if (flat := self._versions.sendable(stream, version)) is None:
            raise ValueError(f"version {version} of stream {stream} is not here to be published")
        self._stage(stream, version, flat)

    def canary(self) -> dict[str, Tensor]:
        """Stages random weights (the canary) as version CANARY_VERSION and returns the probe of this rank's network.

        Rollout workers must give the same probe for it. The probe of version 0 would prove nothing: it is equal to that
        of the model as it was loaded.
        """
        flat = self._canary()
        self._stage(POLICY, CANARY_VERSION, flat)
        with self._parameters.swapped(flat):
            return self._tuning.probe(self._policy.transformer)

    def canary_again(self) -> tuple[Header, ByteArray]:
        """Header and bytes of the canary, for when those that were sent are lost with their node. For any rank."""
        layout = self.policy.layout
        data = layout.packed(canary_tensors(layout, derive(self._config.seed, "canary")))
        return self.policy.draft(CANARY_VERSION).sealed(layout.digests(data)), data

    def clear(self) -> None:
        """Forgets all published versions, so that a restored run can publish them again."""
        for publisher in filter(None, (self.policy, self.ema)):
            publisher.clear()

    def _publisher(self, stream: str) -> SealedVersions:
        if stream == POLICY:
            return self.policy
        if stream != EMA or self.ema is None:
            raise ValueError(f"no stream {stream!r} here, only {POLICY if self.ema is None else f'{POLICY}, {EMA}'}")
        return self.ema

    def _canary(self) -> Tensor:
        tensors = canary_tensors(self.policy.layout, derive(self._config.seed, "canary"))
        return self._parameters.pack(tensors, where="canary", dtype=self._versions.dtype)

    def _stage(self, stream: str, version: int, flat: Tensor) -> None:
        named = self._parameters.named(flat.to(self._parameters.values.device))
        cast("Publisher", self._publisher(stream)).stage(version, named, deadline=self._config.deadlines.publish)
