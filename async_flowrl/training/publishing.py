"""The sending end of the weights, on the trainer rank that sends them: versions of the policy and of its EMA."""

from typing import Any

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


class PublishedStreams:
    """The publishers of the policy and, with `trainer.ema_decay`, of its EMA.

    `stage` and `canary` run in the trainer's main thread. Calls to the publishers themselves run in another thread (the
    "publish" lane), at the same time as the next training step.
    """

    def __init__(self, config: Config, policy: Policy, parameters: FlatParameters, versions: Versions) -> None:
        self._config, self._policy, self._parameters, self._versions = config, policy, parameters, versions
        self._tuning = tuning_of(config)
        tensors, dtypes = parameters.named(parameters.values.data), versions.dtypes
        of_both: Any = {"dtypes": dtypes, "alpha": self._tuning.alpha, "rank": self._tuning.rank}
        of_both["retain"] = config.live_versions
        self.policy = Publisher(tensors, POLICY, **of_both)
        self.ema = None if versions.ema is None else Publisher(tensors, EMA, **of_both)
        self.collective = SendingEnd(self.policy, parameters.values.device)

    def stage(self, version: int, stream: str = POLICY) -> None:
        """Copies a version for its delivery; the trainer waits only for this copy.

        Raises ValueError for an unknown stream and for a version that is neither among the last ones nor held for an
        evaluation.
        """
        publisher = self._publisher(stream)
        if (flat := self._versions.sendable(stream, version)) is None:
            raise ValueError(f"version {version} of stream {stream} is not here to be published")
        self._stage(publisher, version, flat)

    def canary(self) -> dict[str, Tensor]:
        """Stages random weights (the canary) as version CANARY_VERSION and returns the probe of this rank's network.

        Rollout workers must give the same probe for it. The probe of version 0 would prove nothing: it is equal to that
        of the model as it was loaded.
        """
        flat = self._canary()
        self._stage(self.policy, CANARY_VERSION, flat)
        with self._parameters.swapped(flat):
            return self._tuning.probe(self._policy.transformer)

    def canary_again(self) -> tuple[Header, ByteArray]:
        """Header and bytes of the canary, for when those that were sent are lost with their node. For any rank."""
        # Of host memory, so that nothing more is taken on a GPU for it.
        tensors = self._parameters.named(self._canary().cpu())
        dtypes, tuning = self._versions.dtypes, self._tuning
        again = Publisher(tensors, POLICY, dtypes=dtypes, alpha=tuning.alpha, rank=tuning.rank, retain=1)
        again.stage(CANARY_VERSION)
        again.seal(CANARY_VERSION)
        return again.payload(CANARY_VERSION)

    def clear(self) -> None:
        """Forgets all published versions, so that a restored run can publish them again."""
        for publisher in filter(None, (self.policy, self.ema)):
            publisher.clear()

    def _publisher(self, stream: str) -> Publisher:
        if stream == POLICY:
            return self.policy
        if stream != EMA or self.ema is None:
            raise ValueError(f"no stream {stream!r} here, only {POLICY if self.ema is None else f'{POLICY}, {EMA}'}")
        return self.ema

    def _canary(self) -> Tensor:
        tensors = canary_tensors(self.policy.layout, derive(self._config.seed, "canary"))
        return self._parameters.pack(tensors, where="canary", dtype=self._versions.dtype)

    def _stage(self, publisher: Publisher, version: int, flat: Tensor) -> None:
        publisher.stage(version, self._parameters.named(flat), deadline=self._config.deadlines.publish)
