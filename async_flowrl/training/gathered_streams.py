"""The sending end of weights of which every trainer rank has some rows (tune=full with trainer.shard=full)."""

from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from async_flowrl.config.schema import Config
from async_flowrl.policies.base import Policy
from async_flowrl.policies.tuning import tuning_of
from async_flowrl.seeds import derive
from async_flowrl.training.flat import ALIGN_ELEMENTS
from async_flowrl.training.publishing import PublishedStreams
from async_flowrl.training.sharded_parameters import ShardedParameters
from async_flowrl.training.versions import Versions
from async_flowrl.types import POLICY, ByteArray
from checkpoint_engine import CANARY_VERSION, Header, Layout, VersionGone, canary_tensors, tensor_probe
from checkpoint_engine.gather import Gather, GatheredVersions, Share, shard_rows
from checkpoint_engine.layout import dtype_of
from checkpoint_engine.side_stream import recorded


class GatheredStreams(PublishedStreams):
    """As PublishedStreams, on every rank; the first one gathers a version from all of them and sends it.

    All ranks must make the same calls of `canary`, `gather` and `recall` in the same order, one at a time. `gather`
    runs in the "publish" lane, the others between two calls to train.
    """

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
        self._shares: dict[tuple[str, int], Share] = {}
        """Versions that are staged and not gathered."""
        super().__init__(config, policy, parameters, versions)

    @property
    def _sent_from(self) -> torch.device:
        return torch.device("cpu")

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
        """Copies nothing: a version that is kept does not change."""
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
