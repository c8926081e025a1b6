"""The sending end of the weights: versions of the policy and of its EMA, from one rank or gathered from all of them."""

from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from async_flowrl.config.schema import Config
from async_flowrl.policies.base import Policy
from async_flowrl.policies.tuning import tuning_of
from async_flowrl.seeds import derive
from async_flowrl.training.flat import ALIGN_ELEMENTS, FlatParameters
from async_flowrl.training.sharded import ShardedParameters
from async_flowrl.training.versions import Versions
from async_flowrl.types import EMA, POLICY, ByteArray
from checkpoint_engine import CANARY_VERSION, Header, Layout, Publisher, VersionGone, canary_tensors, tensor_probe
from checkpoint_engine.gather import Gather, GatheredVersions, Share, shard_rows
from checkpoint_engine.layout import dtype_of
from checkpoint_engine.publisher import SealedVersions
from checkpoint_engine.side_stream import recorded
from checkpoint_engine.transports import SendingEnd


class PublishedStreams:
    """The publishers of the policy and, with `trainer.ema_decay`, of its EMA.

    `stage` and `canary` run in the trainer's main thread. Calls to the publishers themselves run in another thread (the
    "publish" lane), at the same time as the next training step.
    """

    _sent_from: torch.device | None = None  # Device from which versions are sent; None: that of the weights.

    def __init__(self, config: Config, policy: Policy, parameters: FlatParameters, versions: Versions) -> None:
        self._config, self._policy, self._parameters, self._versions = config, policy, parameters, versions
        self._tuning = tuning_of(config)
        self.policy: SealedVersions = self._new_publisher(POLICY)
        self.ema: SealedVersions | None = None if versions.ema is None else self._new_publisher(EMA)
        self.collective = SendingEnd(self.policy, self._sent_from or parameters.values.device)

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


class GatheredStreams(PublishedStreams):
    """As PublishedStreams, on every rank; the first one gathers a version from all of them and sends it.

    All ranks must make the same calls of `canary`, `gather` and `recall` in the same order, one at a time. `gather`
    runs in the "publish" lane, the others between two calls to train.
    """

    _sent_from = torch.device("cpu")

    def __init__(self, config: Config, policy: Policy, parameters: ShardedParameters, versions: Versions) -> None:
        self._sharded = parameters
        whole = {name: torch.empty(shape, device="meta") for name, shape in parameters.wholes.items()}
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.deadlines.publish))
        self._gather = Gather(
            Layout.of(whole, versions.dtypes),
            group,
            bucket_bytes=config.checkpoint_engine.bucket_bytes,
            alignment=ALIGN_ELEMENTS * versions.dtype.itemsize,
        )
        self._shares: dict[tuple[str, int], Share] = {}  # Versions that are staged and not gathered.
        super().__init__(config, policy, parameters, versions)

    def _new_publisher(self, stream: str) -> GatheredVersions:
        return GatheredVersions(self._gather, stream)

    def gather(self, version: int, stream: str = POLICY) -> Header | None:
        """Gathers a staged version; returns its header on the first rank, None on the others.

        Raises VersionGone if it is not staged, and TransferFailed or WeightsMismatch.
        """
        share = self._shares.pop((stream, version), None)
        if share is None:
            raise VersionGone(f"version {version} of stream {stream} is not staged")
        return cast("GatheredVersions", self._publisher(stream)).gather(version, share)

    def recall(self, version: int, stream: str = POLICY) -> tuple[Header | None, ByteArray | None]:
        """Gathers a version once more that was sent before; returns header and bytes on the first rank.

        Raises VersionGone if the ranks no longer keep it, and TransferFailed or WeightsMismatch.
        """
        flat = self._versions.sendable(stream, version)
        if flat is None:
            raise VersionGone(f"version {version} of stream {stream} is not kept any more")
        return cast("GatheredVersions", self._publisher(stream)).recall(version, self._share(flat))

    def canary(self) -> dict[str, Tensor]:
        """Stages this rank's rows of the canary; returns the probe of the whole network with it, equal on all ranks.

        The ranks gather one tensor after the other.
        """
        flat = self._canary()
        self._shares[POLICY, CANARY_VERSION] = self._share(flat)
        live = tuning_of(self._config).parameters(self._policy.transformer)
        probe: dict[str, Tensor] = {}
        with self._parameters.swapped(flat):
            for name, dtype in sorted(self._versions.dtypes.items()):
                probe |= tensor_probe({name: self._sharded.gathered(live[name]).to(dtype)})
        return probe

    def clear(self) -> None:
        super().clear()
        self._shares.clear()

    def _stage(self, stream: str, version: int, flat: Tensor) -> None:
        self._shares[stream, version] = self._share(flat)

    def _share(self, flat: Tensor) -> Share:
        flat = flat.to(self._versions.dtype)  # An average is kept in float32, in host memory.
        return self._gather.share(flat, recorded(flat.device))

    def _canary(self) -> Tensor:
        """One whole tensor at a time is drawn, so that its values don't depend on the number of ranks."""
        seed, world = derive(self._config.seed, "canary"), self._sharded.world
        rows = {}
        for entry in self.policy.layout.entries:
            whole = canary_tensors(Layout((entry,), entry.nbytes), seed)[entry.name]
            own = shard_rows(entry.shape[0], world.size, world.rank)
            rows[entry.name] = whole[own.start : own.stop].to(dtype_of(entry))
        return self._parameters.pack(rows, where="canary", dtype=self._versions.dtype)
